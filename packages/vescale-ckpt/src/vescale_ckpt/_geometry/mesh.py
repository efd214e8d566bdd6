"""Ranks in rows and columns, as integers: what is left of a `DeviceMesh` in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import LayoutError
from .box import row_major_strides

__all__ = ["Mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Writers in an n-dimensional grid.

    Example:
        >>> Mesh((2, 2), (0, 1, 2, 3)).coordinate(2)
        (1, 0)
    """

    shape: tuple[int, ...]
    """Size of each axis."""
    ranks: Sequence[int]
    """The writer at each place, in row-major order; a `range` where it can be one: 10,000 ranks cost nothing."""

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or not self.ranks:
            raise LayoutError(
                f"mesh: axes of sizes {self.shape} hold {math.prod(self.shape)} ranks, but got {len(self.ranks)}."
            )
        if not isinstance(self.ranks, range):
            ranks = tuple(self.ranks)
            if len(set(ranks)) != len(ranks):
                raise LayoutError(f"mesh: a rank stands twice in {ranks[:64]}.")
            object.__setattr__(self, "ranks", _as_range(ranks) or ranks)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the place of a writer, one index per axis; None if it is not in the mesh."""
        if rank not in self.ranks:
            return None
        place = self.ranks.index(rank)
        return tuple(
            place // stride % size for stride, size in zip(row_major_strides(self.shape), self.shape, strict=True)
        )

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the writer at a place."""
        return self.ranks[sum(c * s for c, s in zip(coordinate, row_major_strides(self.shape), strict=True))]


def _as_range(ranks: tuple[int, ...]) -> range | None:
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1)
    step = ranks[1] - ranks[0]
    candidate = range(ranks[0], ranks[0] + step * len(ranks), step)
    return candidate if tuple(candidate) == ranks else None
