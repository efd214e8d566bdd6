"""Reducing many pending sums at once: one all-reduce per group of ranks and dtype, not one per tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._hooks import collectives
from .._mesh import Axes, MeshInfo
from .._tap import slot
from .record import note

if TYPE_CHECKING:
    from ..hookspecs import Collectives


def all_reduce_batch(
    tensors: Sequence[Tensor], places: Sequence[tuple[MeshInfo, Axes]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[Tensor]:
    """Return the reductions of plain local tensors, each over the mesh axes given with it.

    Args:
        tensors: local parts; they are not changed.
        places: mesh and axes to reduce over, one per tensor; no axes leave the tensor as it is.
        op: how to combine.
    """
    if slot.active and slot.recorder is not None:
        reduced: list[Tensor] = slot.recorder.atomic(all_reduce_batch, (list(tensors), list(places), op), {})
        return reduced
    out = list(tensors)
    groups: dict[Any, list[int]] = {}
    for i, (t, (mesh, axes)) in enumerate(zip(tensors, places, strict=True)):
        wide = tuple(a for a in axes if mesh.sizes[a] > 1)
        if wide:
            groups.setdefault((mesh, wide, t.dtype), []).append(i)
    for (mesh, wide, _), members in groups.items():
        note("all_reduce", sum(tensors[i].numel() * tensors[i].element_size() for i in members), mesh, wide)
        for i, part in zip(members, _reduced([tensors[i] for i in members], mesh, wide, op), strict=True):
            out[i] = part
    return out


_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


def _reduced(tensors: list[Tensor], mesh: MeshInfo, axes: Axes, op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Reduce tensors of one dtype over the same ranks: by the plugin's collectives, else as one flat tensor."""
    provider = _provider()
    if provider is not None:
        parts = [t.clone(memory_format=torch.contiguous_format) for t in tensors]
        provider.all_reduce(parts, mesh.device_mesh, axes, _NAMES[op]).wait()
        return parts
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, op=op, group=mesh.group(axes))
    pieces = torch.split(flat, [t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


@functools.cache
def _provider() -> Collectives | None:
    """What the comm plugin hands out, asked once."""
    return collectives()
