"""What a rank holds under irregular cuts: a few pieces, each a block of the whole and a window of the local part.

All dims that are cut by `Shard` and `InterleavedShard` are cut first, in the order of the mesh; a ragged axis then
takes a run of the rows that the flattened leading dims have left. The local part of a ragged tensor has lengths of
1 in all of these dims but the last, so that it keeps the number of dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._irregular import Interleaved, Ragged

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a block of the global tensor."""
Span = tuple[int, int]
"""Offset and length in one dim."""


class Piece(NamedTuple):
    """A block of the whole tensor that lies in one window of the local part."""

    box: Box
    """Where it is in the whole."""
    window: tuple[Span, ...]
    """Where it is in the local part, per dim; its view has the shape of the box."""


class Holding(NamedTuple):
    """Local shape, and the pieces in the order of the local part's dims."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def chunk(size: int, parts: int, index: int) -> Span:
    """Return (offset, length) of part `index` of `size` elements, as `torch.chunk` cuts them.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def spans_of(sizes: Sequence[int], shape: Sequence[int], types: Sequence[int], at: Sequence[int]) -> list[list[Span]]:
    """What the shards leave of every dim, in rising order; neighbours are joined, nothing is an empty list."""
    per_dim: list[list[Span]] = []
    for dim, n in enumerate(shape):
        axes = [a for a, t in enumerate(types) if t == dim or (isinstance(t, Interleaved) and t.dim == dim)]
        cut = types[axes[0]] if axes else dim
        blocks = cut.blocks if isinstance(cut, Interleaved) else 1
        start, length = 0, n // blocks
        for axis in axes:
            offset, length = chunk(length, sizes[axis], at[axis])
            start += offset
        whole = n // blocks == length
        spans = [(0, n)] if whole else [(b * (n // blocks) + start, length) for b in range(blocks)]
        per_dim.append([s for s in spans if s[1]])
    return per_dim


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Blocks that make up the rows `start` to `stop` of a flattened `shape`, in order; at most 2 * ndim - 1.

    >>> list(runs((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside of one index of the outermost dim
        for offset, length in runs(shape[1:], start - last * inner, stop - last * inner):
            yield (last, *offset), (1, *length)
        return
    if start < first * inner:
        for offset, length in runs(shape[1:], start - (first - 1) * inner, inner):
            yield (first - 1, *offset), (1, *length)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * inner < stop:
        for offset, length in runs(shape[1:], 0, stop - last * inner):
            yield (last, *offset), (1, *length)


def _rows(types: Sequence[int], lengths: Sequence[int], at: Sequence[int]) -> tuple[int, int, int] | None:
    """Leading dims and first and last row of the ragged axes; None where there are none."""
    found: tuple[int, int, int] | None = None
    for axis, t in enumerate(types):
        if isinstance(t, Ragged):
            start, stop = found[1:] if found else (0, math.prod(lengths[: t.lead]))
            found = (t.lead, *t.part(start, stop, at[axis]))
    return found


def holding(sizes: Sequence[int], shape: Sequence[int], types: Sequence[int], at: Sequence[int]) -> Holding:
    """What the rank at a place of the mesh holds.

    Args:
        sizes: of the mesh axes.
        shape: of the whole tensor.
        types: one per mesh axis, which do not `clash`.
        at: coordinate of the rank.
    """
    spans = spans_of(sizes, shape, types, at)
    lengths = [sum(n for _, n in dim) for dim in spans]
    rows = _rows(types, lengths, at)
    lead, start, stop = rows or (0, 0, 0)
    local = (*(1,) * (lead - 1), stop - start, *lengths[lead:]) if rows else tuple(lengths)
    heads: list[tuple[list[Span], list[Span]]] = [([], [])]
    if rows:
        heads, passed = [], 0
        for offset, length in runs(lengths[:lead], start, stop):
            count = math.prod(length)
            box = [(spans[d][0][0] + o, n) for d, (o, n) in enumerate(zip(offset, length, strict=True))]
            heads.append((box, [(0, 1)] * (lead - 1) + [(passed, count)]))
            passed += count
    tails = list(itertools.product(*[_placed(dim) for dim in spans[lead:]]))
    pieces = [
        Piece(_box([*box, *[s for s, _ in tail]]), (*window, *[w for _, w in tail]))
        for box, window in heads
        for tail in tails
    ]
    return Holding(local, tuple(pieces))


def _placed(spans: list[Span]) -> list[tuple[Span, Span]]:
    """Spans of a dim with their places in the local dim."""
    starts = itertools.accumulate((n for _, n in spans), initial=0)
    return [(s, (at, s[1])) for s, at in zip(spans, starts, strict=False)]


def _box(spans: Sequence[Span]) -> Box:
    return tuple(o for o, _ in spans), tuple(n for _, n in spans)


def boxes_in_order(sizes: Sequence[int], shape: Sequence[int], types: Sequence[int], at: Sequence[int]) -> list[Box]:
    """The local elements as boxes in the order of a contiguous local part.

    Where a dim is in several blocks, the dims outside of it are taken index by index.
    """
    spans = spans_of(sizes, shape, types, at)
    lengths = [sum(n for _, n in dim) for dim in spans]
    rows = _rows(types, lengths, at)
    heads: list[list[list[Span]]] = [[]]
    lead = 0
    if rows:
        lead, start, stop = rows
        heads = [
            [[(spans[d][0][0] + o, n)] for d, (o, n) in enumerate(zip(offset, length, strict=True))]
            for offset, length in runs(lengths[:lead], start, stop)
        ]
    found = []
    for head in heads:
        dims = [*head, *spans[lead:]]
        torn = max((d for d, dim in enumerate(dims) if len(dim) > 1), default=0)
        single = [[(o + i, 1) for o, n in dim for i in range(n)] if d < torn else dim for d, dim in enumerate(dims)]
        found += [_box(choice) for choice in itertools.product(*single)]
    return found


# ------------------------------------------------------------------ data


def view_of(local: Tensor, piece: Piece) -> Tensor:
    """View of a piece in the local part, in the shape of its box."""
    for dim, (start, length) in enumerate(piece.window):
        if local.shape[dim] != length:
            local = local.narrow(dim, start, length)
    return local.view(piece.box[1])


def part_of(whole: Tensor, box: Box) -> Tensor:
    """View of a box in the whole tensor, or of a box given relative to a piece's view."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if whole.shape[dim] != length:
            whole = whole.narrow(dim, start, length)
    return whole


def read(whole: Tensor, held: Holding) -> Tensor:
    """A new contiguous local part with the elements of a whole tensor."""
    out = torch.empty(held.shape, dtype=whole.dtype, device=whole.device)
    for piece in held.pieces:
        view_of(out, piece).copy_(part_of(whole, piece.box))
    return out


def write(whole: Tensor, held: Holding, local: Tensor) -> None:
    """Copy a local part to where its elements stand in a whole tensor."""
    for piece in held.pieces:
        part_of(whole, piece.box).copy_(view_of(local, piece))
