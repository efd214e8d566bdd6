"""The even layout, to compare with: every tensor cut by itself into one equal part per rank, as FSDP2 does.

A plan of this package keeps tensors contiguous in the gathered buffer, which the even layout does not: there each
tensor is one piece per rank, and is copied together before use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .buffer import TensorSpec

__all__ = ["even_shard", "row_wise_numel"]


def even_shard(specs: Iterable[TensorSpec], world: int) -> int:
    """Return the elements per rank when each tensor alone gives every rank the same number of blocks.

    Args:
        specs: the tensors; their granularity counts.
        world: number of ranks, at least 1.

    Example:
        >>> even_shard([TensorSpec("w", (7, 10), granularity=20), TensorSpec("b", (3,))], world=2)
        42
    """
    shard = 0
    for spec in specs:
        grain = max(1, min(spec.granularity, spec.numel))
        blocks = -(-spec.numel // grain)
        shard += -(-blocks // world) * grain
    return shard


def row_wise_numel(shapes: Iterable[Sequence[int]], world: int, rows: int = 1) -> int:
    """Return the elements of all ranks under torch's `Shard(0)` with padding, as FSDP2 communicates them.

    Args:
        shapes: of the tensors.
        world: number of ranks, at least 1.
        rows: how many rows of a matrix stay together; of a tensor with three or more dims, whole entries of dim 0 do.

    Example:
        >>> row_wise_numel([(7, 10), (3,)], world=2)
        84
    """
    numel = 0
    for shape in shapes:
        length = shape[0] if shape else 1
        block = 1 if len(shape) > 2 else max(1, min(rows, length))
        numel += -(-length // (world * block)) * block * world * math.prod(shape[1:])
    return numel
