"""The functions of `torch.nn.init` that need more than the operators they call.

All others are right by their operators alone. torch's own algorithms keep running here, so what they draw is what they
draw on one device, also in other versions of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._draw.unseen import unseen
from .dynamo import run_as_it_is
from .operands import take
from .places import place_of, wrap
from .ready import local_of, ready
from .whole import restored_if_it_fails

__all__ = ["WRAPPERS", "with_padding_row"]


_OR = (torch.Tensor.__or__, torch.Tensor.__ror__)


class _GlobalAny(TorchFunctionMode):
    """`x.any()` of a DTensor is the answer for the whole, and `a | b` is right in inference mode.

    In torch the truth value is that of the local part, so a loop `while mask.any()` would end at another round on each
    rank; and in inference mode `|` leaves out the second operand. A mode is seen by this thread only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OR:
            func = torch.bitwise_or
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.any and isinstance(found, DTensor):
            return found.full_tensor()
        return found


def _with_global_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `trunc_normal_`, which draws again until no element is outside of the bounds."""

    @run_as_it_is
    @functools.wraps(function)
    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return function(tensor, *args, **kwargs)
        place_of(tensor)  # a partial tensor is an error before anything is drawn
        with _GlobalAny():
            return function(tensor, *args, **kwargs)

    return wrapped


def _on_the_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `orthogonal_` and `sparse_`, which need the whole matrix: every rank makes it and keeps its part.

    Also for `eye_` and `dirac_`: they draw nothing, but write through `out=` or an index, which does not reach shards.
    """
    draws = function.__name__ not in _DRAW_NOTHING

    @run_as_it_is
    @functools.wraps(function)
    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return function(tensor, *args, **kwargs)
        place = place_of(tensor)
        name = function.__name__
        generator = kwargs.get("generator", next((a for a in args if isinstance(a, torch.Generator)), None))
        if draws:
            local = ready(name, place, tensor._local_tensor, generator)
        else:
            local = local_of(name, tensor._local_tensor) if place.inside else None
        if local is None or local.is_meta:
            return tensor
        whole = torch.empty_strided(
            place.part.global_shape, place.part.global_stride, dtype=tensor.dtype, device=local.device
        )
        with restored_if_it_fails(local.device, generator):
            unseen(function)(whole, *args, **kwargs)
        with torch.no_grad():
            tensor.copy_(wrap(take(whole, place.part, local.stride()), place.like().spec))
        return tensor

    return wrapped


def with_padding_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """For the method of embeddings that zeroes the padding row: in torch the write is lost where rows are sharded."""

    @run_as_it_is
    @functools.wraps(function)
    def wrapped(self: Any) -> Any:
        weight, index = self.weight, self.padding_idx
        if index is None or not isinstance(weight, DTensor):
            return function(self)
        place = place_of(weight)
        local = local_of(function.__name__, weight._local_tensor)
        if place.inside and local is not None:
            with torch.no_grad():
                for view, box in zip(place.part.views(local.detach()), place.part.boxes, strict=True):
                    if box.offset[0] <= index < box.offset[0] + box.shape[0]:
                        view[index - box.offset[0]].zero_()
        return None

    return wrapped


_DRAW_NOTHING = ("dirac_", "eye_")
WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_no_grad_trunc_normal_": _with_global_any,
    "dirac_": _on_the_whole,
    "eye_": _on_the_whole,
    "orthogonal_": _on_the_whole,
    "sparse_": _on_the_whole,
}
"""How the functions of `torch.nn.init` are wrapped, by name."""
