"""Who writes which elements: every replicated box once, cut evenly over its holders.

The tensors of one layout, as far as one group of holders has them, stand one after the other on a line of bytes; holder
`i` of `n` writes the i-th of n equal stretches. Each rank finds its own without a message, and so does a reader.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .box import Box, Piece, normal, row_major_strides
from .layout import Layout

__all__ = ["Assignment", "Geometry"]

UNSPLIT = 64 * 1024
"""Local parts up to this many bytes have one writer: values that must stay together, and few small pieces."""
GRAIN = 4096
"""Larger ones are cut at multiples of this many bytes."""


class Geometry(NamedTuple):
    """What an assignment needs to know of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole."""
    itemsize: int
    """Bytes per element."""
    layout: Layout
    """Which writer holds what."""


@dataclass(slots=True)
class _Line:
    """The local parts of the tensors of one layout, one after the other."""

    starts: list[int]
    """First byte of each tensor's part, and at the end the length of the line."""
    holders: tuple[int, ...]
    """Who shares the line."""

    def stretch(self, holder: int) -> tuple[int, int]:
        """Return the bytes of the holder with this number, before cuts are moved to where they are allowed."""
        total, count = self.starts[-1], len(self.holders)
        return total * holder // count, total * (holder + 1) // count

    def cut(self, byte: int) -> tuple[int, int]:
        """Return the place of a cut as (tensor on the line, byte in it)."""
        at = bisect.bisect_right(self.starts, byte) - 1
        if at == len(self.starts) - 1:
            return at, 0
        size = self.starts[at + 1] - self.starts[at]
        inner = byte - self.starts[at]
        if inner and size <= UNSPLIT:
            return at + 1, 0
        return at, inner // GRAIN * GRAIN


class Assignment:
    """The writers of all elements of a list of tensors.

    Example:
        >>> from .layout import Rule
        >>> from .mesh import Mesh
        >>> both = Rule(Mesh((2,), range(2)), ("R",))
        >>> assignment = Assignment([Geometry((1024, 64), 4, both)])
        >>> [(number, piece.start, piece.stop) for number, piece in assignment.pieces(1)]
        [(0, 32768, 65536)]
        >>> assignment.writers(0, Box((0, 0), (1, 64)))
        [0]
    """

    def __init__(self, tensors: Iterable[Geometry]) -> None:
        """Take the tensors in the order of the manifest."""
        self._tensors = list(tensors)
        self._groups: dict[Layout, list[int]] = {}
        self._place: list[int] = []  # of each tensor among those of its layout
        by_id: dict[int, list[int]] = {}  # hashing a layout once per tensor would cost more than all the rest
        for number, tensor in enumerate(self._tensors):
            group = by_id.get(id(tensor.layout))
            if group is None:
                group = by_id[id(tensor.layout)] = self._groups.setdefault(tensor.layout, [])
            self._place.append(len(group))
            group.append(number)
        self._lines: dict[tuple[int, int], _Line] = {}

    def pieces(self, rank: int) -> list[tuple[int, Piece]]:
        """Return what a writer writes, as (number of the tensor, piece), by layout and in the order of the tensors."""
        found = []
        for layout, group in self._groups.items():
            holders = layout.holders(self._tensors[group[0]].shape, rank)
            if rank not in holders:
                continue
            line = self._line(layout, group, holders)
            low, high = line.stretch(holders.index(rank))
            found += self._between(layout, group, rank, line, line.cut(low), line.cut(high))
        return found

    def writers(self, number: int, box: Box) -> list[int]:
        """Return the writers whose pieces of tensor `number` may meet `box`, rising."""
        tensor = self._tensors[number]
        layout, group, place = tensor.layout, self._groups[tensor.layout], self._place[number]
        found: set[int] = set()
        for holders in layout.overlapping(tensor.shape, box):
            line = self._line(layout, group, holders)
            low, high = self._span(tensor, holders[0], box)
            begin, total, count = line.starts[place], max(1, line.starts[-1]), len(holders)
            # Cuts move by less than a grain or one small tensor, so neighbours are asked too.
            first = max(0, begin * count // total - 1)
            last = min(count - 1, (begin + high) * count // total + 1)
            for holder in range(first, last + 1):
                start, stop = (line.cut(byte) for byte in line.stretch(holder))
                if start < (place, high) and stop > (place, low):
                    found.add(holders[holder])
        return sorted(found)

    def _span(self, tensor: Geometry, rank: int, box: Box) -> tuple[int, int]:
        """Return from which to which byte of a rank's local part the elements of `box` lie."""
        bounds, begin = [], 0
        for mine in tensor.layout.boxes(tensor.shape, rank):
            common = mine.intersect(box)
            if common is not None:
                steps = row_major_strides(mine.shape)
                first = sum((o - m) * s for o, m, s in zip(common.offset, mine.offset, steps, strict=True))
                last = first + sum((size - 1) * s for size, s in zip(common.shape, steps, strict=True))
                bounds += [begin + first, begin + last + 1]
            begin += mine.numel
        return min(bounds) * tensor.itemsize, max(bounds) * tensor.itemsize

    def _line(self, layout: Layout, group: Sequence[int], holders: tuple[int, ...]) -> _Line:
        key = (group[0], holders[0])
        line = self._lines.get(key)
        if line is None:
            starts = [0]
            for number in group:
                tensor = self._tensors[number]
                local = sum(box.numel for box in layout.boxes(tensor.shape, holders[0]))
                starts.append(starts[-1] + local * tensor.itemsize)
            line = self._lines[key] = _Line(starts, holders)
        return line

    def _between(
        self,
        layout: Layout,
        group: Sequence[int],
        rank: int,
        line: _Line,
        first: tuple[int, int],
        last: tuple[int, int],
    ) -> list[tuple[int, Piece]]:
        found = []
        for place in range(first[0], min(len(group), last[0] + 1)):
            tensor = self._tensors[group[place]]
            size = line.starts[place + 1] - line.starts[place]
            low = first[1] // tensor.itemsize if place == first[0] else 0
            high = (last[1] if place == last[0] else size) // tensor.itemsize
            begin = 0
            for box in layout.boxes(tensor.shape, rank):
                start, stop = max(0, low - begin), min(box.numel, high - begin)
                if start < stop:
                    found.append((group[place], normal(Piece(box, start, stop), tensor.shape)))
                begin += box.numel
        return found
