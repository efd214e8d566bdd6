"""Which dims of a reshape lie along each other, and what becomes of blocks where dims are split, merged and cut.

A dim of k blocks, each of which is cut, is what `(k, n / k)` with the second dim cut becomes when flattened. So a
view that splits such a dim at its blocks gives a plain shard, and a view that merges a cut dim into the one before
gives an interleaved one; neither moves data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from .._dispatch.call import Call, Shape, Strategy
from .._irregular import Interleaved, Ragged, interleaved, ragged

When = Callable[[int, list[Strategy]], bool]
Condition = Callable[[int, tuple[int, int], tuple[int, int]], When | None]
"""(axis type, lengths of the old and the new dim, elements per index of each) to a condition of a strategy."""


def reshape_pairs(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Dims that begin the same block of memory: (old dim, new dim, elements per old index, per new index).

    >>> reshape_pairs((4, 6), (2, 2, 6))
    [(0, 0, 1, 2), (1, 2, 1, 1)]
    """
    i = j = 0
    pairs: list[tuple[int, int, int, int]] = []
    ones_old: list[int] = []
    ones_new: list[int] = []
    if 0 in old:  # no elements: only dims that stay where they are can be told apart
        same = itertools.takewhile(lambda ab: ab[0] == ab[1], zip(old, new, strict=False))
        return [(d, d, 1, 1) for d, _ in enumerate(same)]
    while i < len(old) or j < len(new):
        if i < len(old) and old[i] == 1:
            ones_old.append(i)
            i += 1
            continue
        if j < len(new) and new[j] == 1:
            ones_new.append(j)
            j += 1
            continue
        pairs += [(a, b, 1, 1) for a, b in zip(ones_old, ones_new, strict=False)]
        ones_old, ones_new = [], []
        first_i, first_j, p, q = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                p *= old[i]
                i += 1
            else:
                q *= new[j]
                j += 1
        pairs.append((first_i, first_j, p // old[first_i], q // new[first_j]))
    return pairs + [(a, b, 1, 1) for a, b in zip(ones_old, ones_new, strict=False)]


def same_blocks(
    sizes: Sequence[int], dim: int, lengths: tuple[int, int], inner: tuple[int, int]
) -> Callable[[int, list[Strategy]], bool]:
    """Condition that cutting the old dim and cutting the new one give every rank the same elements."""

    def when(axis: int, chosen: list[Strategy]) -> bool:
        blocks = {lengths}
        for a, strategy in enumerate(chosen):
            if strategy.ins[0] == dim:
                blocks = set().union(*[_cut(old, new, sizes[a]) for old, new in blocks])
        n = sizes[axis]
        return all(-(-old // n) * inner[0] == -(-new // n) * inner[1] for old, new in blocks)

    return when


def _cut(old: int, new: int, parts: int) -> set[tuple[int, int]]:
    """Lengths of the parts of two aligned dims: full ones, the remainder, empty ones."""
    step_old, step_new = max(-(-old // parts), 1), max(-(-new // parts), 1)
    found = {(0, 0)}
    if old >= step_old:
        found.add((step_old, step_new))
    if old % step_old:
        found.add((old % step_old, new % step_new))
    return found


def _inner_dims(sizes: Sequence[int], first: int, inner: int) -> Iterator[tuple[int, int, int]]:
    """Dims behind `first` in the same block of memory: (dim, positions of the dims before it, elements per index)."""
    rest, before = inner * sizes[first], 1  # elements of the block of memory
    for dim in range(first, len(sizes)):
        if rest % (before * sizes[dim]):
            return
        if dim > first and sizes[dim] > 1 and before > 1:
            yield dim, before, rest // (before * sizes[dim])
        before *= sizes[dim]
        if before >= rest:
            return


def reshape_strategies(
    call: Call, shape: Shape, pairs: Sequence[tuple[int, int, int, int]], condition: Condition
) -> list[Strategy]:
    """Strategies of a reshape of interleaved dims, and of dims that become interleaved.

    Args:
        call: the reshape.
        shape: of the result.
        pairs: see `reshape_pairs`.
        condition: makes the test that cutting either dim gives the same elements.
    """
    old = call.shape
    if 0 in old:
        return []
    found = _flattened(call, shape)
    kinds = [t for t in dict.fromkeys(call.specs[0].types) if isinstance(t, Interleaved)]
    for d, b, inner_old, inner_new in pairs:
        for kind in kinds:
            if kind.dim != d:
                continue
            block = old[d] // kind.blocks
            if shape[b] % kind.blocks == 0:  # the blocks go on as they are
                lengths = (block, shape[b] // kind.blocks)
                found.append(_strategy(kind, interleaved(b, kind.blocks), condition, lengths, (inner_old, inner_new)))
            for dim, before, inner in _inner_dims(shape, b, inner_new):
                if before == kind.blocks:
                    found.append(_strategy(kind, dim, condition, (block, shape[dim]), (inner_old, inner)))
        for dim, before, inner in _inner_dims(old, d, inner_old):
            if shape[b] % before == 0 and shape[b] > before:
                lengths = (old[dim], shape[b] // before)
                found.append(_strategy(dim, interleaved(b, before), condition, lengths, (inner, inner_new)))
    return found


def _flattened(call: Call, shape: Shape) -> list[Strategy]:
    """Strategies where the rows that a ragged shard flattens are those of other leading dims."""
    found = []
    for kind in dict.fromkeys(call.specs[0].types):
        if isinstance(kind, Ragged):
            rows = math.prod(call.shape[: kind.lead])
            leads = [n for n in range(1, len(shape) + 1) if math.prod(shape[:n]) == rows]
            found += [Strategy((kind,), (ragged(n, kind.units),)) for n in leads[:1]]
    return found


def _strategy(
    here: int, there: int, condition: Condition, lengths: tuple[int, int], inner: tuple[int, int]
) -> Strategy:
    return Strategy((here,), (there,), when=condition(here, lengths, inner))


def cutting_strategies(call: Call, dim: int, lengths: Sequence[int]) -> list[Strategy]:
    """Strategies of cutting an interleaved dim into results that are whole blocks."""
    found = []
    for kind in dict.fromkeys(call.specs[0].types):
        if isinstance(kind, Interleaved) and kind.dim == dim:
            block = call.shape[dim] // kind.blocks
            if block and not any(n % block for n in lengths):
                found.append(Strategy((kind,), tuple(interleaved(dim, n // block) for n in lengths)))
    return found


__all__ = ["cutting_strategies", "reshape_pairs", "reshape_strategies", "same_blocks"]
