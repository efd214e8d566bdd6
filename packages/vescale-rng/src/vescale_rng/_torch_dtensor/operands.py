"""Tensor arguments of random operators: their local parts where a rank draws its own, else their whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .._draw.fill import take as take_into
from .._layout import Part
from .ready import local_of

__all__ = ["aligned", "mixed", "refuse_plain", "take", "whole_of"]


def aligned(op: str, value: Any, result: DTensor, part: Part) -> Any:
    """Return the elements of a parameter that belong to this rank's elements of the result.

    Args:
        op: name of the operator, for messages.
        value: a DTensor that broadcasts to the result, a plain tensor of one element, or a number.
        result: the tensor that is drawn.
        part: of the result.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        refuse_plain(op, value)
        return take(value.expand(part.global_shape), part)
    spec, wanted = value._spec, result._spec
    if value.shape == result.shape and _same_layout(spec, wanted):
        return local_of(op, value._local_tensor)
    return take(whole_of(value).expand(part.global_shape), part)


def _same_layout(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one.placements == other.placements and one.mesh == other.mesh and one.shard_order == other.shard_order


def refuse_plain(op: str, value: Tensor) -> None:
    """Raise what torch raises for a plain tensor among DTensors, unless it counts as replicated there too."""
    if value.numel() != 1 and not DTensor._op_dispatcher._allow_implicit_replication:
        raise mixed(op)


def mixed(op: str) -> RuntimeError:
    """Return the error that torch raises where tensors and DTensors meet."""
    return RuntimeError(
        f"{op}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling "
        "distributed operators!"
    )


def whole_of(tensor: DTensor) -> Tensor:
    """Return a copy of the whole tensor with the strides of one device; all ranks of its mesh must call."""
    full = tensor.full_tensor()
    shape, stride = tuple(tensor.shape), tensor.stride()
    if full.stride() == stride:
        # A replicated tensor is its own whole; what is drawn into a copy must not reach it.
        return full.clone() if full.data_ptr() == tensor._local_tensor.data_ptr() else full
    # An expanded tensor has the same element many times.
    kept = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    whole = torch.empty_strided(full[kept].shape, stride, dtype=full.dtype, device=full.device)
    return whole.copy_(full[kept]).expand(shape)


def take(whole: Tensor, part: Part, stride: tuple[int, ...] | None = None) -> Tensor:
    """Return a local tensor with this rank's elements of a whole one."""
    if stride is None:
        local = torch.empty(part.local_shape, dtype=whole.dtype, device=whole.device)
    else:
        local = torch.empty_strided(part.local_shape, stride, dtype=whole.dtype, device=whole.device)
    take_into(whole, local, part)
    return local
