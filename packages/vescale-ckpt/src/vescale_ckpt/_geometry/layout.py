"""Which boxes of a tensor each writer holds: by a rule (mesh and placements), or listed box by box.

A rule costs the same for ten ranks and for ten thousand, and answers without looking at ranks that do not matter.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import LayoutError
from .box import Box, Piece
from .mesh import Mesh
from .placements import Intervals, Placement, cut, length, parse_placement, ragged, select

__all__ = ["Explicit", "Layout", "Rule"]

Window = tuple[tuple[int, int], ...]
"""Per dim of the local tensor (start, stop)."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A mesh, and how each of its axes cuts the tensor that the axes before it have left.

    Example:
        >>> rule = Rule(Mesh((2, 2), range(4)), ("S(0)", "R"))
        >>> rule.boxes((5, 4), 2)
        (Box(offset=(3, 0), shape=(2, 4)),)
        >>> rule.holders((5, 4), 2)
        (2, 3)
    """

    mesh: Mesh
    """The ranks."""
    placements: tuple[str, ...]
    """One per mesh axis; placements.py lists the forms."""

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise LayoutError(
                f"placements: a mesh of {len(self.mesh.shape)} axes needs one for each, but got {self.placements}."
            )
        for text in self.placements:
            parse_placement(text)

    def check(self, shape: Shape) -> None:
        """Raise LayoutError if the rule cannot cut a tensor of `shape`."""
        for text, size in zip(self.placements, self.mesh.shape, strict=True):
            parse_placement(text).check(len(shape), size)
        self.boxes(shape, self.mesh.ranks[0])

    def ranks(self) -> Sequence[int]:
        """Return the writers that may hold something."""
        return self.mesh.ranks

    def boxes(self, shape: Shape, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a writer in the order of its local storage; none of them is empty."""
        at = self.mesh.coordinate(rank)
        return () if at is None else _part(self.placements, self.mesh.shape, shape, at)[0]

    def windows(self, shape: Shape, rank: int) -> tuple[Window, ...] | None:
        """Return per box its place in the local tensor; None where the boxes stand one after the other in 1-D."""
        at = self.mesh.coordinate(rank)
        return () if at is None else _part(self.placements, self.mesh.shape, shape, at)[1]

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        """Return the writers that hold the same boxes as `rank`, itself among them, in an order that all agree on."""
        at = self.mesh.coordinate(rank)
        return () if at is None else self._copies(at)

    def overlapping(self, shape: Shape, box: Box) -> list[tuple[int, ...]]:
        """Return the groups of writers whose boxes meet `box`; the writers of a group hold the same."""
        found = []
        for at in _meeting(self.placements, self.mesh.shape, shape, box):
            boxes = _part(self.placements, self.mesh.shape, shape, at)[0]
            if any(mine.intersect(box) is not None for mine in boxes):
                found.append(self._copies(at))
        return found

    def _copies(self, at: tuple[int, ...]) -> tuple[int, ...]:
        choices = [
            range(size) if text == "R" else (index,)
            for text, size, index in zip(self.placements, self.mesh.shape, at, strict=True)
        ]
        return tuple(self.mesh.rank(place) for place in itertools.product(*choices))


@dataclass(frozen=True, slots=True)
class Explicit:
    """Boxes listed rank by rank, for tensors that no rule describes."""

    parts: tuple[tuple[int, tuple[Box, ...]], ...]
    """(writer, its boxes in local storage order)."""

    def check(self, shape: Shape) -> None:
        """Raise LayoutError if a box does not lie in a tensor of `shape`."""
        whole = Box.whole(shape)
        for rank, boxes in self.parts:
            for box in boxes:
                if box.ndim != len(shape) or not whole.contains(box):
                    raise LayoutError(f"{box} of rank {rank} does not lie in a tensor of shape {shape}.")

    def ranks(self) -> Sequence[int]:
        """Return the writers that hold something."""
        return [rank for rank, _ in self.parts]

    def boxes(self, shape: Shape, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a writer in the order of its local storage; none of them is empty."""
        return next((tuple(b for b in boxes if b.numel) for owner, boxes in self.parts if owner == rank), ())

    def windows(self, shape: Shape, rank: int) -> tuple[Window, ...] | None:
        """Return per box its place in the local tensor; None where the boxes stand one after the other in 1-D."""
        boxes = self.boxes(shape, rank)
        return None if len(boxes) > 1 else tuple(tuple((0, size) for size in box.shape) for box in boxes)

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        """Return the writers that hold the same boxes as `rank`, itself among them, in an order that all agree on."""
        boxes = self.boxes(shape, rank)
        return tuple(owner for owner, others in self.parts if tuple(b for b in others if b.numel) == boxes)

    def overlapping(self, shape: Shape, box: Box) -> list[tuple[int, ...]]:
        """Return the groups of writers whose boxes meet `box`; the writers of a group hold the same."""
        groups: dict[tuple[Box, ...], list[int]] = {}
        for owner, boxes in self.parts:
            if any(b.intersect(box) is not None for b in boxes):
                groups.setdefault(tuple(b for b in boxes if b.numel), []).append(owner)
        return [tuple(owners) for owners in groups.values()]


Layout: TypeAlias = Rule | Explicit


@functools.lru_cache(maxsize=16384)
def _part(
    placements: tuple[str, ...], sizes: tuple[int, ...], shape: Shape, at: tuple[int, ...]
) -> tuple[tuple[Box, ...], tuple[Window, ...] | None]:
    """Return the boxes and windows of the rank at a place of the mesh."""
    per_dim: list[Intervals] = [((0, size),) if size else () for size in shape]
    rows: tuple[int, int, int] | None = None  # leading dims, and which rows of them are left
    for text, size, index in zip(placements, sizes, at, strict=True):
        placement = parse_placement(text)
        placement.check(len(shape), size)
        if placement.kind == "RS":
            if rows is not None and rows[0] != placement.dim:
                raise LayoutError(f"placements {placements}: two ragged shards must flatten the same dims.")
            _, start, stop = rows or (placement.dim, 0, math.prod(map(length, per_dim[: placement.dim])))
            rows = (placement.dim, *ragged(placement, start, stop, index))
        elif placement.kind != "R":
            if rows is not None and placement.dim < rows[0]:
                raise LayoutError(
                    f"placements {placements}: dim {placement.dim} was flattened by an earlier ragged shard."
                )
            per_dim[placement.dim] = cut(placement, per_dim[placement.dim], size, index)
    if rows is not None:
        return tuple(_ragged_boxes(per_dim, *rows)), None
    boxes, windows = [], []
    for choice in itertools.product(*(zip(dim, _places(dim), strict=True) for dim in per_dim)):
        boxes.append(_box([interval for interval, _ in choice]))
        windows.append(tuple(place for _, place in choice))
    return tuple(boxes), tuple(windows)


def _ragged_boxes(per_dim: Sequence[Intervals], leading: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of rows `start` to `stop` of the flattened leading dims of a product of intervals."""
    shape = tuple(map(length, per_dim))
    for block in Piece(Box.whole(shape[:leading]), start, stop).boxes():
        ranges = list(zip(block.offset, block.stop, strict=True)) + [(0, size) for size in shape[leading:]]
        chosen = [select(intervals, [r]) for intervals, r in zip(per_dim, ranges, strict=True)]
        # Where a dim is in several intervals, dense runs of the storage take the dims outside of it index by index.
        torn = max((dim for dim, intervals in enumerate(chosen) if len(intervals) > 1), default=0)
        ordered = [
            tuple((i, i + 1) for low, high in dim for i in range(low, high)) if number < torn else dim
            for number, dim in enumerate(chosen)
        ]
        yield from map(_box, itertools.product(*ordered))


def _box(intervals: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))


def _places(intervals: Intervals) -> Intervals:
    stops = list(itertools.accumulate((stop - start for start, stop in intervals), initial=0))
    return tuple(itertools.pairwise(stops))


def _meeting(placements: tuple[str, ...], sizes: tuple[int, ...], shape: Shape, box: Box) -> Iterator[tuple[int, ...]]:
    """Yield one place of the mesh for each distinct shard that may meet `box`; replicated axes stand at 0."""
    cuts = [parse_placement(text) for text in placements]
    whole: list[Intervals] = [((0, size),) if size else () for size in shape]
    if box.numel == 0 and box.ndim:
        return
    yield from _descend(cuts, sizes, box, whole, (), None)


def _descend(
    cuts: Sequence[Placement],
    sizes: tuple[int, ...],
    box: Box,
    per_dim: list[Intervals],
    at: tuple[int, ...],
    rows: tuple[int, int] | None,
) -> Iterator[tuple[int, ...]]:
    axis = len(at)
    if axis == len(cuts):
        yield at
        return
    placement = cuts[axis]
    if placement.kind == "R":
        yield from _descend(cuts, sizes, box, per_dim, (*at, 0), rows)
        return
    if placement.kind == "RS":
        start, stop = rows or (0, math.prod(map(length, per_dim[: placement.dim])))
        for index in range(sizes[axis]):
            kept = ragged(placement, start, stop, index)
            if kept[0] < kept[1] and _rows_meet(per_dim[: placement.dim], box, kept):
                yield from _descend(cuts, sizes, box, per_dim, (*at, index), kept)
        return
    dim = placement.dim
    low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
    for index in _candidates(placement, per_dim[dim], sizes[axis], low, high):
        left = cut(placement, per_dim[dim], sizes[axis], index)
        if any(start < high and low < stop for start, stop in left):
            narrowed = [left if number == dim else intervals for number, intervals in enumerate(per_dim)]
            yield from _descend(cuts, sizes, box, narrowed, (*at, index), rows)


def _candidates(placement: Placement, intervals: Intervals, count: int, low: int, high: int) -> range:
    if placement.kind != "S" or len(intervals) != 1:
        return range(count)
    start, stop = intervals[0]
    each = max(1, -(-(stop - start) // count))
    return range(max(0, (low - start) // each), min(count, -(-(high - start) // each)))


def _rows_meet(per_dim: Sequence[Intervals], box: Box, rows: tuple[int, int]) -> bool:
    """Tell whether rows of the flattened leading dims may meet the box: bounds from its corners, no listing."""
    first = last = 0
    for intervals, offset, size in zip(per_dim, box.offset, box.shape, strict=False):
        inside = _local(intervals, offset, offset + size)
        if not inside:
            return False
        total = length(intervals)
        first, last = first * total + inside[0], last * total + inside[1] - 1
    return first < rows[1] and rows[0] <= last


def _local(intervals: Intervals, low: int, high: int) -> tuple[int, int] | tuple[()]:
    """Return the range of the local dim that holds what lies in `low` to `high`; () if nothing does."""
    begin, found = 0, []
    for start, stop in intervals:
        if start < high and low < stop:
            found += [begin + max(low, start) - start, begin + min(high, stop) - start]
        begin += stop - start
    return (found[0], found[-1]) if found else ()
