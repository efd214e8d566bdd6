"""Which chunks hold the elements that are wanted, and where in each: integers only, nothing is read but indexes.

Only the indexes of writers that may hold something are asked for. A chunk that several targets want stands in the plan
once; whether the pieces that were found hold every wanted element exactly once is checked here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._format import Index, Manifest, PieceRecord, TensorRecord
from .._geometry import Assignment, Box, Geometry, Piece
from .._geometry.box import row_major_strides
from .._state import dtype_of
from ..errors import FormatError
from .cover import disjoint
from .target import Request, Target

__all__ = ["IndexView", "Part", "Plan", "Planner", "Want", "run_of", "select"]


class Want(NamedTuple):
    """What a target wants of a chunk."""

    target: Target
    """Where it goes."""
    start: int
    """First element in the chunk that is wanted."""
    stop: int
    """One past the last."""
    at: int
    """The element of the flat target where `start` goes; -1: what lies between is cut into blocks."""


class Part:
    """A chunk of which something is wanted."""

    __slots__ = ("box", "count", "dtype", "first", "index", "itemsize", "name", "row", "wants")

    def __init__(self, index: Index, row: int, name: str, dtype: torch.dtype, box: Box, first: int, count: int) -> None:
        self.index, self.row, self.name = index, row, name
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self.box = box
        """The box of the piece."""
        self.first = first
        """Which element of the box the chunk begins with."""
        self.count = count
        """Elements of the chunk."""
        self.wants: list[Want] = []


class Inline(NamedTuple):
    """A whole small tensor that stands in an index."""

    data: bytes
    """Its bytes."""
    record: TensorRecord
    """What it is."""
    target: Target
    """Where a box of it goes."""


class Plan(NamedTuple):
    """What is to be done for some requests."""

    parts: list[Part]
    """Chunks, in the order in which they were found."""
    inline: list[Inline]
    """Values from indexes."""
    wanted: int
    """Bytes that the requests ask for."""


class IndexView:
    """An index, its pieces sorted by tensor, and where chunks begin."""

    __slots__ = ("_begins", "index", "pieces")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.pieces: dict[int, list[PieceRecord]] = {}
        for record in index.pieces:
            self.pieces.setdefault(record.tensor, []).append(record)
        self._begins: dict[int, list[int]] = {}

    def begins(self, record: PieceRecord, itemsize: int) -> list[int]:
        """Return with which element of the piece's box each chunk begins, and where the last one ends."""
        found = self._begins.get(record.first)
        if found is None:
            raw = self.index.chunks.raw[record.first : record.first + record.count]
            found = list(itertools.accumulate((size // itemsize for size in raw), initial=record.piece.start))
            self._begins[record.first] = found
        return found


class Planner:
    """Finds the chunks of one checkpoint."""

    def __init__(
        self,
        manifest: Manifest,
        index: Callable[[int], IndexView],
        prefetch: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        """Take the manifest, what reads the index of a writer, and what reads several at the same time."""
        self._manifest, self._index, self._prefetch = manifest, index, prefetch
        self._assignment = Assignment(
            Geometry(record.shape, record.itemsize, manifest.layouts[record.layout]) for record in manifest.tensors
        )

    def record(self, number: int, writer: int | None) -> TensorRecord:
        """Return the record of a tensor of the whole, or of a writer's own."""
        count = len(self._manifest.tensors)
        return self._manifest.tensors[number] if writer is None else self._own(writer)[number - count]

    def plan(self, requests: Sequence[Request]) -> Plan:
        """Find what holds the elements of some boxes.

        Raises:
            FormatError: the pieces of the checkpoint do not hold each of the elements exactly once.
        """
        parts: dict[tuple[int, int], Part] = {}
        inline: list[Inline] = []
        wanted = 0
        chosen = [self._writers(request) for request in requests]
        self._prefetch(sorted({writer for writers in chosen for writer in writers}))
        for request, writers in zip(requests, chosen, strict=True):
            size = request.box.numel
            if size == 0:
                continue
            record = self.record(request.number, request.writer)
            wanted += size * record.itemsize
            target = Target(record.name, request, dtype_of(record.dtype))
            found = self._find(request, writers, record, target, parts, inline)
            if found != size:
                raise FormatError(
                    f"{record.name}: of the {size} elements of {request.box}, the pieces of the checkpoint hold "
                    f"{found}; it was not written by this program, or is damaged."
                )
        return Plan(list(parts.values()), inline, wanted)

    def _writers(self, request: Request) -> Sequence[int]:
        """Return the writers that may hold something of a request, after checking that it makes sense."""
        number, box, out, writer = request
        record = self.record(number, writer)
        if box.ndim != len(record.shape) or not Box.whole(record.shape).contains(box):
            raise ValueError(f"{record.name}: {box} does not lie in a tensor of shape {record.shape}.")
        if out is not None and tuple(out.shape) != box.shape:
            raise ValueError(f"{record.name}: a target of shape {tuple(out.shape)} does not fit {box}.")
        if box.numel == 0:
            return ()
        return self._assignment.writers(number, box) if writer is None else (writer,)

    def _find(
        self,
        request: Request,
        writers: Sequence[int],
        record: TensorRecord,
        target: Target,
        parts: dict[tuple[int, int], Part],
        inline: list[Inline],
    ) -> int:
        """Add the parts that hold what is wanted; return how many elements they hold."""
        number, box = request.number, request.box
        found = 0
        runs: list[tuple[int, int]] = []
        blocks: list[Box] = []
        for writer in writers:
            view = self._index(writer)
            data = view.index.inline.get(number)
            if data is not None:
                inline.append(Inline(data, record, target))
                return box.numel
            for piece_record in view.pieces.get(number, ()):
                piece = piece_record.piece
                common = piece.box.intersect(box)
                if common is None:
                    continue
                source, goal = run_of(common, piece.box), run_of(common, box)
                if source is not None and goal is not None:
                    low, high = max(source[0], piece.start), min(source[1], piece.stop)
                    if low < high:
                        found += high - low
                        at = goal[0] + low - source[0]
                        runs.append((at, at + high - low))
                        self._add(parts, view, piece_record, target, low, high, at)
                else:
                    low, high = _extent(common, piece)
                    mine = [both for block in piece.boxes() if (both := block.intersect(box)) is not None]
                    if mine:
                        found += sum(block.numel for block in mine)
                        blocks += mine
                        self._add(parts, view, piece_record, target, low, high, None, common)
        if len(runs) + len(blocks) > 1 and not disjoint(box, runs, blocks):
            raise FormatError(f"{record.name}: pieces of the checkpoint overlap in {box}; it is damaged.")
        return found

    def _add(
        self,
        parts: dict[tuple[int, int], Part],
        view: IndexView,
        record: PieceRecord,
        target: Target,
        low: int,
        high: int,
        at: int | None,
        common: Box | None = None,
    ) -> None:
        """Add the chunks of a piece between two elements of its box."""
        begins = view.begins(record, target.dtype.itemsize)
        writer, box = view.index.writer, record.piece.box
        # Where the gaps between wanted rows are smaller than a chunk, every chunk has some of them.
        gap = 0 if common is None else _largest_gap(common, box)
        for chunk in range(bisect.bisect_right(begins, low) - 1, bisect.bisect_left(begins, high)):
            first, last = begins[chunk], begins[chunk + 1]
            if common is not None and last - first <= gap and not _meets(Piece(box, first, last), common):
                continue
            key = (writer, record.first + chunk)
            part = parts.get(key)
            if part is None:
                part = Part(view.index, key[1], target.name, target.dtype, box, first, last - first)
                parts[key] = part
            start, stop = max(low, first), min(high, last)
            part.wants.append(Want(target, start - first, stop - first, -1 if at is None else at + start - low))

    def _own(self, writer: int) -> Sequence[TensorRecord]:
        return self._index(writer).index.local_tensors


def run_of(inner: Box, outer: Box) -> tuple[int, int] | None:
    """Return from which to which element of `outer` a box in it goes; None if it is not one run of them.

    Example:
        >>> run_of(Box((2, 0), (2, 4)), Box((0, 0), (9, 4)))
        (8, 16)
        >>> run_of(Box((2, 0), (2, 3)), Box((0, 0), (9, 4)))
    """
    if inner.shape == outer.shape:
        return 0, outer.numel
    first = next((dim for dim, size in enumerate(inner.shape) if size != 1), inner.ndim)
    if inner.shape[first + 1 :] != outer.shape[first + 1 :]:
        return None
    begin = _flat(inner.offset, outer)
    return begin, begin + inner.numel


def select(data: Tensor, part: Part, want: Want, low: int) -> list[tuple[Tensor, Tensor]]:
    """Return (destination, source) for each block of a chunk that a target wants.

    Args:
        data: elements of the chunk from number `low` on, 1-D.
        part: the chunk.
        want: what is wanted of it.
        low: the first element that `data` holds.
    """
    target = want.target
    if target.out is None:
        return []
    found = []
    begin = want.start - low
    first = part.first + want.start
    for block in Piece(part.box, first, part.first + want.stop).boxes():
        size = block.numel
        common = block.intersect(target.box)
        if common is not None:
            source = data[begin : begin + size].view(block.shape)[common.slices(block)]
            found.append((target.out[common.slices(target.box)], source))
        begin += size
    return found


def _flat(index: Sequence[int], box: Box) -> int:
    steps = row_major_strides(box.shape)
    return sum((i - o) * s for i, o, s in zip(index, box.offset, steps, strict=True))


def _extent(common: Box, piece: Piece) -> tuple[int, int]:
    """Return the first and one past the last element of a piece's box that may lie in `common`."""
    last = tuple(stop - 1 for stop in common.stop)
    return max(_flat(common.offset, piece.box), piece.start), min(_flat(last, piece.box) + 1, piece.stop)


def _largest_gap(common: Box, box: Box) -> int:
    """Return at least the number of elements of `box` between two neighbours in `common`."""
    steps = row_major_strides(box.shape)
    sizes = zip(box.shape, common.shape, steps, strict=True)
    return sum((size - kept) * step for dim, (size, kept, step) in enumerate(sizes) if dim)


def _meets(piece: Piece, box: Box) -> bool:
    return any(block.intersect(box) is not None for block in piece.boxes())
