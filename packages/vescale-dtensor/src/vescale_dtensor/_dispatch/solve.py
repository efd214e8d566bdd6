"""Choosing a strategy for every mesh axis.

The choice per axis is the strategy with the least (bytes moved forward, bytes moved backward), in
this order of importance: with both on one scale a gathered activation could pay for a bias
gradient. Ties go to the strategy named first, so all ranks and all runs choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._irregular import is_cut
from .._mesh import MeshInfo
from ..placements import AxisTypes, I, P, R, dual
from .call import Call, Shape, Strategy
from .irregular import fits_together


def solve(
    call: Call, strategies: Sequence[Strategy], shapes: Sequence[Shape], *, keep_first: bool = False
) -> tuple[list[AxisTypes], list[AxisTypes]] | None:
    """Return the types of operands and results, per tensor; None where no strategy fits.

    Args:
        call: the call.
        strategies: what is valid along one axis.
        shapes: global shapes of the results.
        keep_first: the first operand must stay where it is, because it is changed in place.
    """
    if keep_first:  # what is written is labelled as what was there
        strategies = [s for s in strategies if s.outs[0] == s.ins[0]]
    chosen: list[Strategy] = []
    for axis in range(call.mesh.ndim):
        best = _best(call, strategies, shapes, axis, chosen, keep_first)
        if best is None:
            return None
        chosen.append(best)
    ins = [tuple(s.ins[i] for s in chosen) for i in range(len(call.specs))]
    outs = [tuple(s.outs[i] for s in chosen) for i in range(len(shapes))]
    return ins, outs


def _best(
    call: Call,
    strategies: Sequence[Strategy],
    shapes: Sequence[Shape],
    axis: int,
    chosen: list[Strategy],
    keep_first: bool,
) -> Strategy | None:
    current = tuple([s.types[axis] for s in call.specs])
    for strategy in strategies:  # what needs no move costs nothing, whatever the sizes
        if strategy.ins == current and _fits(call, strategy, shapes, axis, chosen):
            return strategy
    best, least = None, (math.inf, math.inf)
    for strategy in strategies:
        if keep_first and strategy.ins[0] != current[0]:
            continue
        if strategy.exact and not all(a == b or (a == I and b == R and s.ndim == 0)
                                      for a, b, s in zip(current, strategy.ins, call.specs, strict=True)):  # fmt: skip
            continue
        if not _fits(call, strategy, shapes, axis, chosen):
            continue
        cost = _cost(call, strategy, axis)
        if cost < least:
            best, least = strategy, cost
    return best


def _fits(call: Call, strategy: Strategy, shapes: Sequence[Shape], axis: int, chosen: list[Strategy]) -> bool:
    if strategy.when is not None and not strategy.when(axis, chosen):
        return False
    if not fits_together(call, strategy, shapes, axis, chosen):
        return False
    return not strategy.even or _even(call, strategy, shapes, axis, chosen)


def _even(call: Call, strategy: Strategy, shapes: Sequence[Shape], axis: int, chosen: list[Strategy]) -> bool:
    sizes = call.mesh.sizes
    for which, dim in strategy.even:
        if which >= 0:
            length = call.specs[which].shape[dim]
            parts = sizes[axis] * _parts([s.ins[which] for s in chosen], dim, sizes)
            parts *= math.prod(sizes[a] for a in range(axis + 1, call.mesh.ndim) if call.specs[which].types[a] == dim)
        else:
            length = shapes[~which][dim]
            parts = sizes[axis] * _parts([s.outs[~which] for s in chosen], dim, sizes)
        if length % parts:
            return False
    return True


def _parts(types: list[int], dim: int, sizes: Sequence[int]) -> int:
    return math.prod(sizes[a] for a, t in enumerate(types) if t == dim)


def _cost(call: Call, strategy: Strategy, axis: int) -> tuple[float, float]:
    ranks = call.mesh.sizes[axis]
    forward = backward = 0.0
    for spec, to in zip(call.specs, strategy.ins, strict=True):
        here = spec.types[axis]
        if here != to:
            forward += _bytes(here, to, spec.numel, ranks)
            backward += _bytes(dual(to), dual(here), spec.numel, ranks) + 1e-3
            if (here, to) == (R, I):
                backward += 1e-2
    return forward, backward


def _bytes(here: int, to: int, numel: int, ranks: int) -> float:
    """Elements that one rank sends for a move along one axis; a move of nothing still costs a message."""
    share = (ranks - 1) / ranks * (numel + 1)
    if here == to:
        return 0.0
    if is_cut(here):
        # to P: no message, but everyone then works on the whole
        return share / ranks if is_cut(to) else share + (to == P)
    if here == P:
        return 2 * share  # to S would be half: not counted, or every consumer of a sum would shard it
    return 0.0


def unwanted(mesh: MeshInfo, here: AxisTypes, to: AxisTypes) -> bool:
    """Whether going from `here` to `to` re-cuts or gathers sharded data."""
    return any(
        is_cut(a) and b != a and b != P and mesh.sizes[k] > 1 for k, (a, b) in enumerate(zip(here, to, strict=True))
    )
