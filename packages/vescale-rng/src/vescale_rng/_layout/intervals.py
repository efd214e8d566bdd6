"""Which indices of one dim a rank holds, as a list of intervals, and the part that such lists of all dims make.

Cutting a dim for a mesh axis cuts the list, so the same dim can be cut again and again, and dims may be of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product

from .part import Box, Part, Window, contiguous_stride

Intervals = tuple[tuple[int, int], ...]
"""Per interval (start, stop) of the whole dim; the local dim is the intervals one after the other; none is empty."""


def length(intervals: Intervals) -> int:
    """Return the size of the local dim.

    Example:
        >>> length(((0, 2), (4, 7)))
        5
    """
    return sum(stop - start for start, stop in intervals)


def select(intervals: Intervals, ranges: Iterable[tuple[int, int]]) -> Intervals:
    """Return the intervals that remain of a local dim if only `ranges` of it are kept.

    Args:
        intervals: the local dim as it is.
        ranges: (start, stop) within the local dim, rising and disjoint.

    Example:
        >>> select(((0, 4), (8, 12)), [(2, 6)])
        ((2, 4), (8, 10))
    """
    found: list[tuple[int, int]] = []
    at, begin = 0, 0  # interval in hand, and where it begins in the local dim
    for low, high in ranges:
        while low < high:
            start, stop = intervals[at]
            if low >= begin + stop - start:
                at, begin = at + 1, begin + stop - start
                continue
            first = start + low - begin
            last = min(stop, start + high - begin)
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
            low += last - first
    return tuple(found)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of piece `index` of `count` of a dim: `torch.chunk` with empty pieces at the end.

    Example:
        >>> [chunk(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-size // count)
    return min(size, each * index), min(size, each * (index + 1))


def chunk_of_each(size: int, blocks: int, count: int, index: int) -> list[tuple[int, int]]:
    """Return the ranges of a dim that is cut into `blocks` chunks, of each of which piece `index` of `count` is kept.

    Example:
        >>> chunk_of_each(8, 2, 2, 1)
        [(2, 4), (6, 8)]
    """
    ranges = []
    each = max(1, -(-size // blocks))
    for begin in range(0, size, each):
        start, stop = chunk(min(each, size - begin), count, index)
        if start < stop:
            ranges.append((begin + start, begin + stop))
    return ranges


def part_of_intervals(
    global_shape: tuple[int, ...], global_stride: tuple[int, ...] | None, per_dim: Sequence[Intervals]
) -> Part:
    """Return the part that holds the product of one list of intervals per dim: one box for each combination.

    Args:
        global_shape: shape of the whole tensor.
        global_stride: its strides in elements; contiguous if None.
        per_dim: the intervals of each dim, in the order of the local dim.

    Example:
        >>> part_of_intervals((4, 4), None, [((0, 2),), ((0, 1), (3, 4))]).local_shape
        (2, 2)
    """
    boxes: list[Box] = []
    windows: list[Window] = []
    local = [places(intervals) for intervals in per_dim]
    for choice in product(*(zip(*pair, strict=True) for pair in zip(per_dim, local, strict=True))):
        boxes.append(box_of([interval for interval, _ in choice]))
        windows.append(tuple(place for _, place in choice))
    return Part(
        global_shape,
        contiguous_stride(global_shape) if global_stride is None else global_stride,
        tuple(map(length, per_dim)),
        tuple(boxes),
        tuple(windows),
    )


def places(intervals: Intervals) -> Intervals:
    """Return where each interval lies in the local dim."""
    stops = list(accumulate((stop - start for start, stop in intervals), initial=0))
    return tuple(pairwise(stops))


def box_of(intervals: Sequence[tuple[int, int]]) -> Box:
    """Return the box of one interval per dim."""
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))
