"""Boxes of a tensor, and runs of their elements in row-major order.

A run of a d-dimensional box is at most `2 * d - 1` boxes, so slicing and copying never goes element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Box", "Piece", "normal", "row_major_strides"]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor.

    Example:
        >>> Box((2, 0), (4, 3)).intersect(Box((4, 1), (9, 9)))
        Box(offset=(4, 1), shape=(2, 2))
    """

    offset: tuple[int, ...]
    """First element, one index per dim."""
    shape: tuple[int, ...]
    """Number of elements per dim; any 0 makes the box empty."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last element, per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what lies in both boxes; None if that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + s, b + t) - o
            for a, s, b, t, o in zip(self.offset, self.shape, other.offset, other.shape, offset, strict=True)
        )
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def contains(self, other: Box) -> bool:
        """Tell whether every element of `other` lies in this box."""
        return all(
            a <= b and b + t <= a + s
            for a, s, b, t in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds the box `within`."""
        return tuple(slice(o - w, o - w + s) for o, s, w in zip(self.offset, self.shape, within.offset, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of a box, counted in the box's row-major order.

    Example:
        >>> Piece(Box((10, 0), (3, 4)), 2, 9).boxes()
        [Box(offset=(10, 2), shape=(1, 2)), Box(offset=(11, 0), shape=(1, 4)), Box(offset=(12, 0), shape=(1, 1))]
    """

    box: Box
    """The box."""
    start: int
    """First element."""
    stop: int
    """One past the last element."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def boxes(self) -> list[Box]:
        """Return the piece as boxes in the tensor's coordinates, in order."""
        found = []
        start, shape = self.start, self.box.shape
        steps = row_major_strides(shape)
        while start < self.stop:
            # The largest box that begins here: of the outermost dim of which `start` begins a row and a row is left.
            dim = 0
            while dim < len(shape) and (start % steps[dim] or start + steps[dim] > self.stop):
                dim += 1
            inner = [start // step % size for step, size in zip(steps, shape, strict=True)]
            offset = tuple(o + i for o, i in zip(self.box.offset, inner, strict=True))
            if dim == len(shape):  # 0-d
                return [Box(offset, ())]
            rows = min((self.stop - start) // steps[dim], shape[dim] - inner[dim])
            found.append(Box(offset, (1,) * dim + (rows,) + shape[dim + 1 :]))
            start += rows * steps[dim]
        return found


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    Example:
        >>> row_major_strides((2, 3, 4))
        (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def normal(piece: Piece, shape: tuple[int, ...]) -> Piece:
    """Return a piece that is one run of the whole tensor as such a run, and any other piece as it is.

    Then equal elements have equal pieces, whichever box they were cut from.

    Args:
        piece: a piece of a tensor.
        shape: shape of the tensor.

    Example:
        >>> normal(Piece(Box((2, 0), (2, 4)), 1, 8), (9, 4))
        Piece(box=Box(offset=(0, 0), shape=(9, 4)), start=9, stop=16)
    """
    box = piece.box
    if box.shape == shape:
        return piece
    first = next((dim for dim, size in enumerate(box.shape) if size != 1), box.ndim)
    if box.shape[first + 1 :] != shape[first + 1 :]:
        return piece
    begin = sum(o * s for o, s in zip(box.offset, row_major_strides(shape), strict=True))
    return Piece(Box.whole(shape), begin + piece.start, begin + piece.stop)
