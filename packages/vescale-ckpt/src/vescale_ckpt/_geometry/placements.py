"""One placement of a mesh axis, as it is written in a manifest, and how it cuts a dim.

| text | meaning |
| --- | --- |
| `R` | every rank of the axis holds the same |
| `S(d)` | dim d is cut into as many chunks as the axis has ranks, as `torch.chunk` cuts, empty chunks at the end |
| `SS(d,f)` | dim d is cut into f chunks, each of which is cut again (torch's `_StridedShard`) |
| `IS(d,k)` | dim d is k equal blocks, each of which is cut (merged q, k and v) |
| `RS(n,u0,u1,...)` | the leading n dims, flattened, are cut in proportion to the units (ragged) |
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from itertools import accumulate

from ..errors import LayoutError

__all__ = ["Intervals", "Placement", "cut", "length", "parse_placement", "select"]

Intervals = tuple[tuple[int, int], ...]
"""Per interval (start, stop) in the whole dim; the local dim is the intervals one after the other; none is empty."""

_FORM = re.compile(r"(R|S|SS|IS|RS)(?:\((\d{1,18}(?:,\d{1,18})*)\))?", re.ASCII)
_NUMBERS = {"R": 0, "S": 1, "SS": 2, "IS": 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh axis cuts a tensor.

    Example:
        >>> str(Placement("SS", 0, 2))
        'SS(0,2)'
    """

    kind: str
    """"R", "S", "SS", "IS" or "RS"."""
    dim: int = 0
    """Tensor dim that is cut; of "RS" the number of leading dims that are flattened."""
    blocks: int = 1
    """Number of blocks of the dim that are cut on their own ("SS", "IS")."""
    units: tuple[int, ...] = ()
    """Sizes of the ranks' parts in proportion ("RS")."""

    def __str__(self) -> str:
        numbers = {
            "R": (),
            "S": (self.dim,),
            "SS": (self.dim, self.blocks),
            "IS": (self.dim, self.blocks),
            "RS": (self.dim, *self.units),
        }[self.kind]
        return f"{self.kind}({','.join(map(str, numbers))})" if numbers else self.kind

    def check(self, ndim: int, size: int) -> None:
        """Raise LayoutError if this cannot cut a tensor of `ndim` dims over an axis of `size` ranks."""
        if self.kind in ("S", "SS", "IS") and self.dim >= ndim:
            raise LayoutError(f"placement {self}: a tensor of {ndim} dims has no dim {self.dim}.")
        if self.kind == "RS" and not 1 <= self.dim <= max(1, ndim):
            raise LayoutError(f"placement {self}: cannot flatten {self.dim} leading dims of {ndim}.")
        if self.kind == "RS" and len(self.units) != size:
            raise LayoutError(f"placement {self}: {len(self.units)} units for an axis of {size} ranks.")


@functools.lru_cache(maxsize=1024)
def parse_placement(text: str) -> Placement:
    """Return the placement that `text` stands for.

    Raises:
        LayoutError: `text` is none.

    Example:
        >>> parse_placement("RS(1,3,0,2)")
        Placement(kind='RS', dim=1, blocks=1, units=(3, 0, 2))
    """
    match = _FORM.fullmatch(text)
    numbers = [int(n) for n in match[2].split(",")] if match and match[2] else []
    if match is None or (match[1] != "RS" and len(numbers) != _NUMBERS[match[1]]) or (match[1] == "RS" and not numbers):
        raise LayoutError(
            f"placement: {text[:100]!r} is none of R, S(dim), SS(dim,factor), IS(dim,blocks), RS(n,units)."
        )
    kind = match[1]
    if kind == "RS":
        return Placement(kind, numbers[0], 1, tuple(numbers[1:]))
    dim, blocks = (*numbers, 0, 1)[:2] if len(numbers) != 1 else (numbers[0], 1)
    if blocks < 1:
        raise LayoutError(f"placement: {text!r} has no blocks; there must be at least 1.")
    return Placement(kind, dim, blocks)


def length(intervals: Intervals) -> int:
    """Return the size of the local dim."""
    return sum(stop - start for start, stop in intervals)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of chunk `index` of `count` of a dim, as `torch.chunk` cuts.

    Example:
        >>> [chunk(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-size // count)
    return min(size, each * index), min(size, each * (index + 1))


def cut(placement: Placement, intervals: Intervals, count: int, index: int) -> Intervals:
    """Return what rank `index` of `count` keeps of a dim ("S", "SS", "IS").

    Args:
        placement: how the axis cuts.
        intervals: what the axes before it have left of the dim.
        count: number of ranks of the axis.
        index: the rank's place on the axis.

    Raises:
        LayoutError: an interleaved shard of a dim that is not so many equal blocks.
    """
    size = length(intervals)
    if placement.kind == "S":
        return select(intervals, [chunk(size, count, index)])
    if placement.kind == "IS" and size % placement.blocks:
        raise LayoutError(f"placement {placement}: {size} elements are not {placement.blocks} equal blocks.")
    each = max(1, -(-size // placement.blocks))
    kept = []
    for begin in range(0, size, each):
        start, stop = chunk(min(each, size - begin), count, index)
        kept.append((begin + start, begin + stop))
    return select(intervals, kept)


def ragged(placement: Placement, start: int, stop: int, index: int) -> tuple[int, int]:
    """Return the rows that rank `index` keeps of the rows `start` to `stop` of the flattened leading dims ("RS").

    Raises:
        LayoutError: the units do not divide the rows.
    """
    stops = _stops(placement.units)
    total = stops[-1]
    if stop - start and (not total or (stop - start) % total):
        raise LayoutError(f"placement {placement}: {total} units in all do not divide {stop - start} rows.")
    unit = (stop - start) // total if total else 0
    return start + unit * stops[index], start + unit * stops[index + 1]


@functools.lru_cache(maxsize=256)
def _stops(units: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(units, initial=0))


def select(intervals: Intervals, ranges: list[tuple[int, int]]) -> Intervals:
    """Return the intervals that remain of a local dim if only `ranges` of it, rising and disjoint, are kept.

    Example:
        >>> select(((0, 4), (8, 12)), [(2, 6)])
        ((2, 4), (8, 10))
    """
    found: list[tuple[int, int]] = []
    begin, at = 0, 0  # where interval `at` begins in the local dim
    for low, high in ranges:
        while low < high:
            start, stop = intervals[at]
            if low >= begin + stop - start:
                begin, at = begin + stop - start, at + 1
                continue
            first, last = start + low - begin, min(stop, start + high - begin)
            low += last - first
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
    return tuple(found)
