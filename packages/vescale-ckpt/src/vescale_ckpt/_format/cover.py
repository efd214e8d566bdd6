"""Do the pieces of all writers make up every tensor, each shard once? Told from manifest and indexes, without data."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from .._geometry import Box, Explicit, Layout, Piece, normal
from .index import Index
from .manifest import Manifest, TensorRecord

__all__ = ["check_cover"]

_STEPS = 1 << 22
"""Slabs that are looked at before listed boxes are called too irregular to check."""
Run = tuple[int, int, int]
"""(start, stop, writer) in a box."""


def check_cover(manifest: Manifest, indexes: Iterable[Index]) -> list[str]:
    """Return what is missing, written twice or written by a rank that does not hold it; nothing if all is well.

    Args:
        manifest: of a checkpoint.
        indexes: of all its writers.

    Returns:
        One sentence per problem.
    """
    world = len(manifest.tensors)
    written: list[list[tuple[int, Piece]]] = [[] for _ in range(world)]
    inline: list[list[int]] = [[] for _ in range(world)]
    problems, seen = [], set()
    for index in indexes:
        if index.writer in seen:
            problems.append(f"writer {index.writer}: two indexes.")
        seen.add(index.writer)
        for record in index.pieces:
            if record.tensor < world:
                written[record.tensor].append((index.writer, record.piece))
        for number in index.inline:
            if number < world:
                inline[number].append(index.writer)
        problems += _local_problems(index, world)
    missing = manifest.world - len(seen)
    if missing:
        some = [writer for writer in range(manifest.world) if writer not in seen][:8]
        problems.append(f"{missing} of {manifest.world} writers have no index, first {some}.")
    groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for number, tensor in enumerate(manifest.tensors):
        kind = (tensor.layout, tensor.shape)
        layout = manifest.layouts[tensor.layout]
        if kind not in groups:
            groups[kind] = layout.overlapping(tensor.shape, Box.whole(tensor.shape))
            problems += _holes(layout, tensor, groups[kind])
        problems += _tensor_problems(tensor, layout, groups[kind], written[number], inline[number])
    return problems


def _local_problems(index: Index, world: int) -> Iterator[str]:
    parts: list[list[tuple[int, Piece]]] = [[] for _ in index.local_tensors]
    for record in index.pieces:
        if record.tensor >= world:
            parts[record.tensor - world].append((index.writer, record.piece))
    for number, tensor in enumerate(index.local_tensors):
        if world + number not in index.inline:
            whole = (Box.whole(tensor.shape),) if tensor.nbytes else ()
            yield from _shard_problems(tensor, whole, parts[number], (index.writer,))


def _tensor_problems(
    tensor: TensorRecord,
    layout: Layout,
    groups: Sequence[tuple[int, ...]],
    pieces: list[tuple[int, Piece]],
    inline: list[int],
) -> Iterator[str]:
    if inline:
        writers = sorted({*inline, *(writer for writer, _ in pieces)})
        if pieces or len(inline) > 1:
            yield f"tensor {tensor.name!r}: stored whole in an index and once more (writers {writers})."
        return
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    parts: list[list[tuple[int, Piece]]] = [[] for _ in groups]
    for writer, piece in pieces:
        if writer in group_of:
            parts[group_of[writer]].append((writer, piece))
        else:
            yield f"tensor {tensor.name!r}: written in part by writer {writer}, which holds nothing of it."
    for group, part in zip(groups, parts, strict=True):
        yield from _shard_problems(tensor, layout.boxes(tensor.shape, group[0]), part, group)


def _shard_problems(
    tensor: TensorRecord, boxes: Sequence[Box], pieces: list[tuple[int, Piece]], holders: tuple[int, ...]
) -> Iterator[str]:
    """Yield what is wrong with the pieces of one distinct shard: runs of its boxes, compared as sorted intervals."""
    wanted: dict[Box, list[Run]] = defaultdict(list)
    for box in boxes:
        whole = normal(Piece(box, 0, box.numel), tensor.shape)
        wanted[whole.box].append((whole.start, whole.stop, holders[0]))
    found: dict[Box, list[Run]] = defaultdict(list)
    for writer, piece in pieces:
        piece = normal(piece, tensor.shape)
        found[piece.box].append((piece.start, piece.stop, writer))
    name = f"tensor {tensor.name!r}"
    for box in {**wanted, **found}:
        runs, place = sorted(found[box]), f"elements {{}}:{{}} of the box at {box.offset} of shape {box.shape}"
        for before, after in itertools.pairwise(runs):
            if before[1] > after[0]:
                both = place.format(after[0], min(before[1], after[1]))
                yield f"{name}: {both} written twice, by writers {before[2]} and {after[2]}."
        targets = _joined(wanted[box])
        joined = _joined(runs)
        for start, stop in _minus(targets, joined):
            yield f"{name}: {place.format(start, stop)} missing; held by writers {list(holders[:8])}."
        for start, stop in _minus(joined, targets):
            yield f"{name}: {place.format(start, stop)} written by writers that do not hold them {list(holders[:8])}."


def _joined(runs: Iterable[Run]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop, _ in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _minus(these: Sequence[tuple[int, int]], those: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what sorted, disjoint intervals have that others do not."""
    at = 0
    for start, stop in these:
        while at < len(those) and those[at][1] <= start:
            at += 1
        other = at
        while start < stop:
            if other == len(those) or those[other][0] >= stop:
                yield start, stop
                break
            if those[other][0] > start:
                yield start, those[other][0]
            start = max(start, those[other][1])
            other += 1


def _holes(layout: Layout, tensor: TensorRecord, groups: Sequence[tuple[int, ...]]) -> Iterator[str]:
    if not isinstance(layout, Explicit):  # a rule leaves none
        return
    steps = [_STEPS]
    boxes = [box for group in groups for box in layout.boxes(tensor.shape, group[0])]
    try:
        hole = _hole(Box.whole(tensor.shape), boxes, 0, steps)
    except OverflowError:
        yield f"tensor {tensor.name!r}: its {len(boxes)} boxes are too irregular to tell whether they cover it."
        return
    if hole is not None:
        yield f"tensor {tensor.name!r}: no rank holds the element at {hole} of shape {tensor.shape}."


def _hole(whole: Box, boxes: Sequence[Box], dim: int, steps: list[int]) -> tuple[int, ...] | None:
    """Return an element that no box holds, or None: a sweep along `dim`, and in each slab one along the next dim."""
    if dim == whole.ndim:
        return None if boxes or whole.numel == 0 else ()
    if whole.shape[dim] == 0:
        return None
    events = sorted({0, *(box.offset[dim] for box in boxes), *(box.stop[dim] for box in boxes)})
    opening = sorted(boxes, key=lambda box: box.offset[dim])
    at, active = 0, list[Box]()
    before: list[Box] | None = None
    for start in events:
        if start >= whole.shape[dim]:
            break
        active = [box for box in active if box.stop[dim] > start]
        while at < len(opening) and opening[at].offset[dim] <= start:
            active.append(opening[at])
            at += 1
        steps[0] -= 1 + len(active)
        if steps[0] < 0:
            raise OverflowError
        if active == before:
            continue
        before = list(active)
        inner = _hole(whole, active, dim + 1, steps)
        if inner is not None:
            return (start, *inner)
    return None
