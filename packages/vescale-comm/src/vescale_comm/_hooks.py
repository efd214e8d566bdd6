"""The hooks of this package as typed functions: each calls one hook and checks the answer.

Nothing is kept here: a caller asks once, at construction or first use, and keeps what it got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plugins import check_answer, fingerprint, manager, wrong_answer

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from .hookspecs import CompressorRegistry, Layout, Timeline

LAYOUT_MEMBERS = ("global_shape", "global_stride", "boxes", "local", "replicas", "partial")


def plugin_layout(tensor: torch.Tensor) -> Layout | None:
    """Ask plugins how `tensor` is sharded; None if none of them knows its class."""
    answer: Layout | None = manager().hook.vescale_layout(tensor=tensor)
    if answer is not None:
        check_answer("vescale_layout", answer, *LAYOUT_MEMBERS)
    return answer


def gradient_reduction(param: torch.nn.Parameter) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Ask plugins over which mesh axes the gradient of `param` is a partial sum; None if nobody knows."""
    answer: tuple[DeviceMesh, tuple[int, ...]] | None = manager().hook.vescale_gradient_reduction(param=param)
    if answer is None:
        return None
    hook = "vescale_gradient_reduction"
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], tuple)):
        raise wrong_answer(hook, answer, "it must be (mesh, tuple of mesh axes)")
    mesh, axes = answer
    if list(axes) != sorted(set(axes)) or not all(0 <= axis < mesh.ndim for axis in axes):
        raise wrong_answer(hook, answer, f"the axes must increase and lie in 0 <= axis < {mesh.ndim}")
    return answer


def register_compressors(registry: CompressorRegistry) -> None:
    """Let plugins add gradient compressors."""
    manager().hook.vescale_register_compressors(registry=registry)


def timeline() -> Timeline | None:
    """Ask plugins for the recorder of spans; None if nothing is to be recorded."""
    answer: Timeline | None = manager().hook.vescale_timeline()
    if answer is not None:
        check_answer("vescale_timeline", answer, "begin", "end")
    return answer


def plugin_fingerprint() -> str:
    """Return a short hash of the plugins that serve this package; it must be the same on every rank."""
    return fingerprint()
