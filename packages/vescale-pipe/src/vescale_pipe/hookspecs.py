"""What vescale_pipe asks plugins.

Write a plugin with `pluggy.HookimplMarker("vescale_pipe")` and an entry point in the group `vescale`:
docs/plugins.md has an example. Specs and implementations take positional arguments without defaults;
an implementation may leave out arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

hookspec = pluggy.HookspecMarker("vescale_pipe")


class ScheduleRegistry(Protocol):
    """Takes pipeline schedules."""

    def register(self, name: str, build: Callable[..., Any]) -> None:
        """Add a schedule under a name that is not taken yet.

        Args:
            name: what the user writes to choose it.
            build: called as `build(num_ranks, num_microbatches)`, returns a `Schedule`. It may have arguments `chunks`
                (stages per rank), `costs` and `memory`, which get what the user gives.
        """


@hookspec
def vescale_register_schedules(registry: ScheduleRegistry) -> None:
    """Add pipeline schedules.

    Called once, when a schedule is first asked for by name.

    Args:
        registry: where to register; a name that is taken is an error.
    """


@hookspec
def vescale_wrap_stage(
    module: torch.nn.Module, mesh: DeviceMesh
) -> Callable[[torch.nn.Module], torch.nn.Module] | None:
    """Offer a wrapper for the module of a pipeline stage, such as data parallelism around it.

    Called once per local stage when an engine is built, on every rank. The wrappers of all plugins are
    applied one around the other: the plugin that is asked first is innermost.

    Args:
        module: the module of the stage, before any wrapper.
        mesh: the mesh of the ranks that hold this stage; it has no pipeline axis.

    Returns:
        A function from the module (as wrapped so far) to the wrapped one, or None to leave it alone.
    """
