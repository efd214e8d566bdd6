"""Local parts: what of a parameter or gradient lies on this rank, and whether it is a pending sum.

torch's own DTensor is known here; other classes through the hook `vescale_layout`; all others count as plain.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .. import _hooks
from ..errors import CommError

__all__ = ["is_plain", "local_gradient", "local_of"]


def _torch_dtensor() -> Any:
    """Return the class, or None while nobody can have made an object of it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is its own local part."""
    return type(tensor) is Tensor or type(tensor) is Parameter or local_of(tensor) is tensor


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, which shares its memory; the tensor itself where it is plain.

    If it is still on its way from other ranks, this waits for it.
    """
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return tensor
    known = _torch_dtensor()
    if known is not None and isinstance(tensor, known):
        local: Tensor = tensor._local_tensor
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None and isinstance(local, functional.AsyncCollectiveTensor):
            return _arrived(local)
        return local
    layout = _hooks.plugin_layout(tensor)
    return tensor if layout is None else layout.local


def _arrived(local: Any) -> Tensor:
    """Wait for a tensor of torch that is on its way, and return the plain one."""
    plain: Tensor = local.wait()
    return plain


def local_gradient(name: str, param: Tensor, grad: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the local part of a gradient, to be summed over the ranks.

    Args:
        name: of the parameter, for errors.
        param: the parameter.
        grad: its gradient, as autograd left it.
        axes: axes of the parameter's mesh over which the sum goes anyway, so that parts of it may come as they are.

    Raises:
        CommError: the gradient is a pending sum over ranks that the reduction does not reach.
    """
    known = _torch_dtensor()
    if known is not None and isinstance(grad, known):
        return _of_torch(param, grad, axes)
    layout = None if type(grad) is Tensor else _hooks.plugin_layout(grad)
    if layout is None:
        return grad
    if layout.partial and not axes:
        raise CommError(
            f"{name}: its gradient is a pending sum over ranks of its mesh, but vescale_gradient_reduction named no "
            "axes for the parameter. The plugin that knows this tensor class must name them."
        )
    return layout.local


def _of_torch(param: Any, grad: Any, axes: tuple[int, ...]) -> Tensor:
    """Bring a gradient to the placements of its parameter, but over `axes` to a pending sum."""
    pending = {axis for axis in axes if grad.placements[axis].is_partial()}
    wanted = tuple(
        have if axis in pending else want
        for axis, (have, want) in enumerate(zip(grad.placements, param.placements, strict=True))
    )
    if tuple(grad.placements) != wanted:
        grad = grad.redistribute(placements=wanted)
    local = local_of(grad)
    here = grad.device_mesh.get_coordinate()
    if any(here[axis] != 0 for axis in axes if axis not in pending):
        # It is whole already; as a pending sum the first rank has all of it, and the others nothing.
        return local.new_zeros(local.shape)
    return local
