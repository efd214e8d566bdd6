"""Reducing many pending sums at once: one all-reduce per group of ranks and dtype, not one per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._mesh import Axes, MeshInfo
from .record import note


def all_reduce_batch(
    tensors: Sequence[Tensor], places: Sequence[tuple[MeshInfo, Axes]], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[Tensor]:
    """Return the reductions of plain local tensors, each over the mesh axes given with it.

    Args:
        tensors: local parts; they are not changed.
        places: mesh and axes to reduce over, one per tensor; no axes leave the tensor as it is.
        op: how to combine.
    """
    out = list(tensors)
    groups: dict[Any, list[int]] = {}
    for i, (t, (mesh, axes)) in enumerate(zip(tensors, places, strict=True)):
        wide = tuple(a for a in axes if mesh.sizes[a] > 1)
        if wide:
            groups.setdefault((mesh, wide, t.dtype), []).append(i)
    for (mesh, wide, _), members in groups.items():
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        note("all_reduce", flat.numel() * flat.element_size(), mesh, wide)
        dist.all_reduce(flat, op=op, group=mesh.group(wide))
        for i, part in zip(members, torch.split(flat, [tensors[i].numel() for i in members]), strict=True):
            out[i] = part.view(tensors[i].shape)
    return out
