"""State dicts of parallelized modules: whole, plain tensors and other layouts load too."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from .._comm.move import move
from .._spec import replicated
from .._tensor import DTensor, make


def align_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Give the entries of a state dict the layout of the tensors that they will be loaded into.

    A plain tensor is taken as the whole, the same on every rank, and is cut locally. A DTensor of another
    layout is redistributed, for which every rank must load. Entries that do not fit are left to
    `load_state_dict`, which reports them.
    """
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, target in held:
        value = state_dict.get(prefix + name)
        if not isinstance(target, DTensor) or not isinstance(value, Tensor):
            continue
        spec = target._spec
        if tuple(value.shape) != tuple(spec.shape):
            continue
        if not isinstance(value, DTensor):
            value = make(value.detach(), replicated(spec.mesh, spec.shape))
        if value._spec.mesh is spec.mesh:
            state_dict[prefix + name] = move(cast("DTensor", value.detach()), spec.types)
