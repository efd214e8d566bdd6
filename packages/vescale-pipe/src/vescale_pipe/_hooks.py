"""The hooks of this package as typed functions: each calls one hook and checks the answer.

Nothing is kept here: a caller asks once, at construction or first use, and keeps what it got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plugins import fingerprint, manager, wrong_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from .hookspecs import ScheduleRegistry


def register_schedules(registry: ScheduleRegistry) -> None:
    """Let plugins add pipeline schedules."""
    manager().hook.vescale_register_schedules(registry=registry)


def wrap_stage(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Return `module` inside the wrappers that plugins offer for it; the module itself if there are none."""
    wrappers: list[Callable[[torch.nn.Module], torch.nn.Module]]
    wrappers = manager().hook.vescale_wrap_stage(module=module, mesh=mesh)
    for wrapper in wrappers:
        if not callable(wrapper):
            raise wrong_answer("vescale_wrap_stage", wrapper, "it must be a function of the module")
        wrapped = wrapper(module)
        if not callable(getattr(wrapped, "forward", None)):
            raise wrong_answer("vescale_wrap_stage", wrapped, "the wrapper must return a module")
        module = wrapped
    return module


def plugin_fingerprint() -> str:
    """Return a short hash of the plugins that serve this package; it must be the same on every rank."""
    return fingerprint()
