"""Reading from and writing to one block of a dim by positions in the whole dim.

A rank reads zeros where a position lies in another rank's block, so the ranks' results add up to
the whole one; it writes only the positions that lie in its own block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._spec import Spec


def in_block(positions: Tensor, spec: Spec, dim: int, *, negative: bool) -> tuple[Tensor, Tensor]:
    """Positions counted from the start of this rank's block, and which of them lie in it.

    Positions elsewhere become 0. With `negative`, those below zero count from the end.

    Raises:
        RuntimeError: a position lies outside the dim.
    """
    size, start, length = spec.shape[dim], spec.local_offset[dim], spec.local_shape[dim]
    lowest = -size if negative else 0
    if positions.numel():
        torch._assert_async(
            ((positions >= lowest) & (positions < size)).all(), f"index out of range for dim {dim} of size {size}"
        )
    here = (torch.where(positions < 0, positions + size, positions) if negative else positions) - start
    inside = (here >= 0) & (here < length)
    return torch.where(inside, here, 0), inside


def readable(x: Tensor, dim: int) -> Tensor:
    """`x`, or zeros of length 1 along `dim` that depend on `x` where it is empty there."""
    return x if x.shape[dim] else x.sum(dim, keepdim=True, dtype=x.dtype)


def adjacent(dims: Sequence[int]) -> bool:
    """Whether indexed dims follow one another, so that the result's dims stand in their place."""
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))
