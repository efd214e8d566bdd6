"""The walk: which ranges of a draw are produced, and where their elements go in the local tensor.

A source produces contiguous ranges of the whole tensor's memory order. A local part is boxes, so its elements stand in
that order as runs: one run for rows of a matrix, one per row for columns of it. Short runs are not worth a seek each:
whole rows are produced then and cut. A plan decides that by cost, once per part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .._layout import Part
from ..errors import LayoutError
from .source import Source

__all__ = ["memory_order", "walk"]

CHUNK = 1 << 18
"""Elements of a buffer that rows are produced in before they are cut: a few of them fit a cache."""
LONG = 4096
"""Ranges of more elements than this are not worth a copy."""
KEPT_STEPS = 64
"""Plans of up to so many steps are kept as tuples; longer ones are made anew while they run."""
JUMP_COST = 7e5
"""A gap costs no more than this, in produced elements: a jump in the stream."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a block that belong to one box."""

    view: int
    """Index of the box."""
    source: tuple[slice, ...]
    """Where they stand in the block."""
    target: tuple[Any, ...]
    """Where they go in the view of the box, dims in memory order."""


@dataclass(frozen=True, slots=True)
class Step:
    """A block of the whole tensor that is produced at once: full rows of some dim in memory order."""

    start: int
    """Where the block begins in the draw."""
    shape: tuple[int, ...]
    low: int
    high: int
    """Range of the block that is needed; steps follow one another by it."""
    copies: tuple[Copy, ...]
    direct: bool
    """Whether the block is one copy from end to end, so that it can be produced where it goes."""

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return math.prod(self.shape)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dims of a tensor from the largest stride to the smallest, those of size 1 left out.

    torch's serial kernels fill a dense output in this order (facts: element order of TensorIterator).

    >>> memory_order((2, 3, 4), (12, 1, 3)), memory_order((5, 1), (1, 1))
    ((0, 2, 1), (0,))
    """
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    return tuple(sorted(dims, key=lambda d: -stride[d]))


@dataclass(frozen=True, slots=True)
class _Block:
    """A box in memory order."""

    view: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def _blocks(part: Part, order: tuple[int, ...]) -> list[_Block]:
    return [
        _Block(i, tuple(box.offset[d] for d in order), tuple(box.shape[d] for d in order))
        for i, box in enumerate(part.boxes)
        if math.prod(box.shape)
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that produce a part."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    groups: tuple[tuple[tuple[_Block, ...], int], ...]
    """Blocks whose runs interleave in the stream, with the dim whose rows are produced together."""
    kept: tuple[Step, ...] | None
    """The steps, where they are few."""

    def steps(self) -> Iterator[Step]:
        """Steps in the order of the stream."""
        if self.kept is not None:
            return iter(self.kept)
        return (step for blocks, level in self.groups for step in _group_steps(blocks, level, self.shape))


@functools.lru_cache(maxsize=4096)
def plan_of(part: Part, seek_cost: float, skip_cost: float, grain: int) -> Plan:
    """Decide how a part is produced from a source with these costs.

    Raises:
        LayoutError: if elements of the whole tensor share their place in memory.
    """
    shared = any(step == 0 and size > 1 for step, size in zip(part.global_stride, part.global_shape, strict=True))
    if shared and part.numel:
        raise LayoutError(
            f"global_stride: {part.global_stride} puts several elements of shape {part.global_shape} in one place, and "
            "torch fills no such tensor; give the strides of `whole.contiguous()` if that is what one device fills"
        )
    order = memory_order(part.global_shape, part.global_stride)
    shape = tuple(part.global_shape[d] for d in order)
    blocks = _blocks(part, order)
    groups = tuple((group, _level(group, shape, seek_cost, skip_cost, grain)) for group in _interleaved(blocks, shape))
    count = sum(_count(group, level, shape) for group, level in groups)
    plan = Plan(order, shape, groups, None)
    return plan if count > KEPT_STEPS else Plan(order, shape, groups, tuple(plan.steps()))


def _position(index: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for i, size in zip(index, shape, strict=True):
        position = position * size + i
    return position


def _interleaved(blocks: list[_Block], shape: tuple[int, ...]) -> list[tuple[_Block, ...]]:
    """Group blocks so that the groups follow one another in the stream."""

    def first(block: _Block) -> int:
        return _position(block.offset, shape)

    def last(block: _Block) -> int:
        return _position([o + s - 1 for o, s in zip(block.offset, block.shape, strict=True)], shape)

    groups: list[list[_Block]] = []
    end = -1
    for block in sorted(blocks, key=first):
        if groups and first(block) <= end:
            groups[-1].append(block)
        else:
            groups.append([block])
        end = max(end, last(block))
    return [tuple(group) for group in groups]


def _bounds(blocks: Sequence[_Block]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of the box around some blocks."""
    offset = tuple(map(min, zip(*[b.offset for b in blocks], strict=True)))
    ends = [[o + s for o, s in zip(b.offset, b.shape, strict=True)] for b in blocks]
    return offset, tuple(e - o for o, e in zip(offset, map(max, zip(*ends, strict=True)), strict=True))


def _level(blocks: Sequence[_Block], shape: tuple[int, ...], seek: float, skip: float, grain: int) -> int:
    """Dim whose rows are produced in one piece, at the least cost."""
    offset, size = _bounds(blocks)
    span = 1 + _position([o + s - 1 for o, s in zip(offset, size, strict=True)], shape) - _position(offset, shape)
    best, best_cost = 0, math.inf
    runs = 1
    for level in range(max(1, len(shape))):
        length = math.prod(size[level : level + 1]) * math.prod(shape[level + 1 :])
        gap = max(0, span - runs * length) / max(1, runs - 1) if runs > 1 else 0
        cost = runs * (seek + length + (grain - 1) * (runs > 1)) + (runs - 1) * min(gap * skip, JUMP_COST)
        if cost < best_cost:
            best, best_cost = level, cost
        runs *= math.prod(size[level : level + 1])
    return best


def _count(blocks: Sequence[_Block], level: int, shape: tuple[int, ...]) -> int:
    _, size = _bounds(blocks)
    length = math.prod(size[level : level + 1]) * math.prod(shape[level + 1 :])
    return math.prod(size[:level]) * max(1, length // CHUNK)


def _group_steps(blocks: tuple[_Block, ...], level: int, shape: tuple[int, ...]) -> Iterator[Step]:
    offset, size = _bounds(blocks)
    if not shape:
        yield Step(0, (), 0, 1, (Copy(blocks[0].view, (), ()),), direct=True)
        return
    inner = math.prod(shape[level + 1 :])
    whole_rows = len(blocks) == 1 and size[level + 1 :] == shape[level + 1 :]
    rows = size[level] if whole_rows else max(1, CHUNK // inner)
    for outer in product(*[range(o, o + s) for o, s in zip(offset[:level], size[:level], strict=True)]):
        base = _position(outer, shape[:level]) * shape[level]
        for row in range(offset[level], offset[level] + size[level], rows):
            stop = min(row + rows, offset[level] + size[level])
            copies = tuple(c for b in blocks if (c := _copy(b, outer, row, stop, level)) is not None)
            if copies:
                block_shape = (stop - row, *shape[level + 1 :])
                low = min(_position([s.start for s in c.source], block_shape) for c in copies)
                high = 1 + max(_position([s.stop - 1 for s in c.source], block_shape) for c in copies)
                yield Step((base + row) * inner, block_shape, low, high, copies, whole_rows)


def _copy(block: _Block, outer: tuple[int, ...], row: int, stop: int, level: int) -> Copy | None:
    """What of rows `[row, stop)` of dim `level`, at `outer` in the dims before it, belongs to a block."""
    for i, o, s in zip(outer, block.offset, block.shape, strict=False):
        if not o <= i < o + s:
            return None
    low, high = max(row, block.offset[level]), min(stop, block.offset[level] + block.shape[level])
    if low >= high:
        return None
    inside = tuple(slice(o, o + s) for o, s in zip(block.offset[level + 1 :], block.shape[level + 1 :], strict=True))
    target = (*(i - o for i, o in zip(outer, block.offset, strict=False)),)
    rows = slice(low - block.offset[level], high - block.offset[level])
    return Copy(block.view, (slice(low - row, high - row), *inside), (*target, rows))


# ------------------------------------------------------------------ running a plan


class _Ranges:
    """Produces ranges of any alignment from a source: a block that two ranges share is kept between them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.grain = source.grain
        self.kept_start = -1
        self.kept: Tensor | None = None

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        grain = self.grain
        if grain == 1:
            self.source.emit(out, start, params)
            return
        stop = start + out.numel()
        low, high = start - start % grain, min(self.source.numel, -(-stop // grain) * grain)
        if any(isinstance(p, Tensor) for p in params):
            self._emit_with_tensors(out, start, params, low, high)
            return
        if self.kept is not None and low == self.kept_start:
            shared = min(stop, low + self.kept.numel()) - start
            out[:shared].copy_(self.kept[start - low : start - low + shared])
            if start + shared < stop:
                self.emit(out[shared:], start + shared, params)
            return
        if low == start and high == stop:
            self.source.emit(out, start, params)
            return
        last = (high - 1) // grain * grain
        if low == start and last > low:  # all but the last block where it goes, without a buffer
            self.source.emit(out[: last - low], low, params)
            self.emit(out[last - low :], last, params)
            return
        if low < start and high - low > max(4 * grain, LONG):  # the first block through a buffer, the rest directly
            head = low + grain - start
            self.emit(out[:head], start, params)
            self.emit(out[head:], low + grain, params)
            return
        buffer = out.new_empty(high - low)
        self.source.emit(buffer, low, params)
        out.copy_(buffer[start - low : stop - low])
        self.kept_start, self.kept = last, buffer[last - low :]

    def _emit_with_tensors(self, out: Tensor, start: int, params: tuple[Any, ...], low: int, high: int) -> None:
        """Produce whole blocks whose parameters are known for our elements only; no block is kept for others.

        A block may be asked for twice then: sources that take tensors and have a grain count, they do not step.
        """
        given = tuple(_padded(p, start - low, high - low) if isinstance(p, Tensor) else p for p in params)
        buffer = out.new_empty(high - low)
        self.source.emit(buffer, low, given)
        out.copy_(buffer[start - low : start - low + out.numel()])


def _padded(values: Tensor, before: int, total: int) -> Tensor:
    """Put values among zeros."""
    padded = values.new_zeros(total)
    padded[before : before + values.numel()].copy_(values)
    return padded


def walk(source: Source, part: Part, local: Tensor, params: tuple[Any, ...]) -> None:
    """Produce the elements of a part.

    Args:
        source: the draw.
        part: which elements.
        local: gets them; of shape `part.local_shape`, any strides.
        params: parameters of the distribution; tensors among them have the shape of `local`.
    """
    program = program_of(part, local.stride(), source.seek_cost, source.skip_cost, source.grain)
    emit = source.emit if source.grain == 1 else _Ranges(source).emit
    if program is None or any(isinstance(p, Tensor) for p in params):
        _walk_by_steps(emit, plan_of(part, source.seek_cost, source.skip_cost, source.grain), part, local, params)
        return
    base = local.storage_offset()
    for start, count, moves in program:
        if isinstance(moves, int):
            emit(local.as_strided((count,), (1,), base + moves), start, params)
            continue
        block = torch.empty(count, dtype=local.dtype, device=local.device)
        emit(block, start, params)
        for shape, stride, offset, target_stride, target_offset in moves:
            target = local.as_strided(shape, target_stride, base + target_offset)
            target.copy_(block.as_strided(shape, stride, offset))


_Move = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int]
"""Shape; strides and offset in the block; strides and offset in the local tensor."""


@functools.lru_cache(maxsize=4096)
def program_of(
    part: Part, stride: tuple[int, ...], seek_cost: float, skip_cost: float, grain: int
) -> tuple[tuple[int, int, int | tuple[_Move, ...]], ...] | None:
    """Reduce a plan to numbers for local tensors of given strides; None for a plan of many steps.

    Returns:
        Per step where it begins in the draw, how many elements it needs, and where they go: an offset in the local
        tensor where they go in one piece, else copies from a block.
    """
    plan = plan_of(part, seek_cost, skip_cost, grain)
    if plan.kept is None:
        return None
    views = _ordered_views(part, plan.order, torch.empty_strided(part.local_shape, stride, device="meta"))
    program: list[tuple[int, int, int | tuple[_Move, ...]]] = []
    for step in plan.kept:
        targets = [views[copy.view][copy.target] for copy in step.copies]
        if step.direct and targets[0].is_contiguous():
            program.append((step.start, step.numel, int(targets[0].storage_offset())))
            continue
        block = torch.empty(step.numel, device="meta").view(step.shape)
        moves = []
        for copy, target in zip(step.copies, targets, strict=True):
            source = block[copy.source]
            place = int(source.storage_offset()) - step.low
            moves.append((tuple(target.shape), source.stride(), place, target.stride(), int(target.storage_offset())))
        program.append((step.start + step.low, step.high - step.low, tuple(moves)))
    return tuple(program)


def _walk_by_steps(
    emit: Callable[[Tensor, int, tuple[Any, ...]], None], plan: Plan, part: Part, local: Tensor, params: tuple[Any, ...]
) -> None:
    """Run a plan step by step: one of many steps, or one whose parameters are tensors."""
    views = _ordered_views(part, plan.order, local)
    param_views = [_ordered_views(part, plan.order, p) if isinstance(p, Tensor) else None for p in params]
    has_tensors = any(views is not None for views in param_views)
    scratch: Tensor | None = None  # one for all steps: fresh memory costs more than the numbers in it
    for blocks, level in plan.groups:
        rows = None if has_tensors else _rows(blocks, level, plan.shape, views)
        if rows is not None:
            for start, row in rows:
                emit(row, start, params)
            continue
        for step in _group_steps(blocks, level, plan.shape):
            given = _step_params(step, params, param_views) if has_tensors else params
            if step.direct:
                target = views[step.copies[0].view][step.copies[0].target]
                if target.is_contiguous():
                    emit(target.view(-1), step.start, given)
                    continue
            if scratch is None or scratch.numel() < step.numel:
                scratch = torch.empty(step.numel, dtype=local.dtype, device=local.device)
            block = scratch[: step.numel]
            emit(block[step.low : step.high], step.start + step.low, given)
            shaped = block.view(step.shape)
            for copy in step.copies:
                views[copy.view][copy.target].copy_(shaped[copy.source])


_ROWS = 4096
"""Views of rows that are made at once."""


def _rows(
    blocks: tuple[_Block, ...], level: int, shape: tuple[int, ...], views: list[Tensor]
) -> Iterator[tuple[int, Tensor]] | None:
    """Starts and targets of runs that are one block's, each of which goes where it belongs; None if they do not.

    What steps come to for the columns of a matrix, at a fifth of their cost.
    """
    block = blocks[0]
    if len(blocks) > 1 or level == 0 or block.shape[level + 1 :] != shape[level + 1 :]:
        return None
    runs, run = math.prod(block.shape[:level]), math.prod(block.shape[level:])
    try:
        targets = views[block.view].view(runs, run)
    except RuntimeError:  # the local tensor's strides do not let runs be counted
        return None
    return (
        None
        if targets.stride(1) != 1 and run != 1
        else zip(_starts(block, level, shape), _unbound(targets), strict=True)
    )


def _starts(block: _Block, level: int, shape: tuple[int, ...]) -> Iterator[int]:
    """Where the runs of a block begin in the draw."""
    steps = [math.prod(shape[d + 1 :]) for d in range(level + 1)]
    first = block.offset[level] * steps[level]
    outer = zip(block.offset[:level], block.shape[:level], steps, strict=False)
    places = [range(o * step, (o + s) * step, step) for o, s, step in outer]
    return (first + sum(place) for place in product(*places))


def _unbound(rows: Tensor) -> Iterator[Tensor]:
    for first in range(0, rows.shape[0], _ROWS):
        yield from rows[first : first + _ROWS].unbind(0)


def _ordered_views(part: Part, order: tuple[int, ...], local: Tensor) -> list[Tensor]:
    """Views of the boxes with dims in memory order and dims of size 1 left out."""
    ordered = []
    for view, box in zip(part.views(local), part.boxes, strict=True):
        shape, stride = view.shape, view.stride()
        if not box.numel:  # no step asks for it, and the dim of no elements may be left out below
            ordered.append(view)
            continue
        ordered.append(view.as_strided([shape[d] for d in order], [stride[d] for d in order], view.storage_offset()))
    return ordered


def _step_params(step: Step, params: tuple[Any, ...], views: list[list[Tensor] | None]) -> tuple[Any, ...]:
    """Parameters for what is needed of a block; elements that are not ours get zeros."""
    given = []
    for value, ordered in zip(params, views, strict=True):
        if ordered is None:
            given.append(value)
            continue
        block = value.new_zeros(step.numel)  # zeros draw as much
        shaped = block.view(step.shape)
        for copy in step.copies:
            shaped[copy.source].copy_(ordered[copy.view][copy.target])
        given.append(block[step.low : step.high])
    return tuple(given)
