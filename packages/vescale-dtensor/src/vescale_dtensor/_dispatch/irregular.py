"""Strategies for ragged and interleaved operands, derived from those for shards.

A rule that is `uniform` treats every position of a dim alike and by itself, so that what holds for a block of
positions holds for any set of them: a shard of a dim may be an interleaved one, and where all leading dims may be
sharded in the same way, they may be flattened and cut raggedly. Other rules never see such operands: the engine
moves them to a layout that the rule knows, under the communication policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._irregular import Interleaved, Irregular, Ragged, clash, is_irregular, with_dim
from ..placements import I, P, R
from .call import Call, Shape, Strategy


def derived(call: Call, strategies: Sequence[Strategy], shapes: Sequence[Shape]) -> list[Strategy]:
    """Further strategies for the irregular types that the operands have."""
    kinds = dict.fromkeys(t for s in call.specs for t in s.types if isinstance(t, Irregular))
    plain = [
        s
        for s in strategies
        if not (s.even or s.exact or s.when or s.block or is_irregular(s.ins) or is_irregular(s.outs))
    ]
    found: list[Strategy] = []
    for kind in kinds:
        if isinstance(kind, Interleaved):
            found += _interleaved(call, kind, plain, shapes)
        elif isinstance(kind, Ragged):
            found += _ragged(call, kind, plain, shapes)
    return found


def _interleaved(
    call: Call, kind: Interleaved, strategies: Iterable[Strategy], shapes: Sequence[Shape]
) -> list[Strategy]:
    """Strategies along the dims that lie along the interleaved one in the operands that have it."""
    found = []
    for s in strategies:
        fits = any(t == kind.dim and kind in spec.types for t, spec in zip(s.ins, call.specs, strict=True))
        lengths = {spec.shape[t] for t, spec in zip(s.ins, call.specs, strict=True) if t >= 0}
        lengths |= {shape[t] for t, shape in zip(s.outs, shapes, strict=True) if t >= 0}
        if fits and len(lengths) == 1 and not lengths.pop() % kind.blocks:
            found.append(Strategy(tuple(_blocks(t, kind) for t in s.ins), tuple(_blocks(t, kind) for t in s.outs)))
    return found


def _blocks(axis_type: int, kind: Interleaved) -> int:
    return with_dim(kind, axis_type) if axis_type >= 0 else axis_type


def _ragged(call: Call, kind: Ragged, strategies: Sequence[Strategy], shapes: Sequence[Shape]) -> list[Strategy]:
    """The strategy in which every operand either has all of the leading dims or none of them."""
    owners = [i for i, spec in enumerate(call.specs) if kind in spec.types]
    family = []
    for dim in kind.dims:
        along = next((s for s in strategies if s.ins[owners[0]] == dim), None)
        if along is None:
            return []
        family.append(along)
    ins = [_together([s.ins[i] for s in family], kind) for i in range(len(call.specs))]
    outs = [_together([s.outs[i] for s in family], kind) for i in range(len(shapes))]
    rows = call.specs[owners[0]].shape[: kind.lead]
    given = [(t, spec.shape) for t, spec in zip(ins, call.specs, strict=True)]
    if (
        None in ins
        or None in outs
        or any(
            t == kind and tuple(shape[: kind.lead]) != tuple(rows)
            for t, shape in (*given, *zip(outs, shapes, strict=True))
        )
    ):
        return []
    return [Strategy(tuple(t for t in ins if t is not None), tuple(t for t in outs if t is not None))]


def _together(types: Sequence[int], kind: Ragged) -> int | None:
    """What a tensor is whose dims 0, 1, ... are `types` along an axis that cuts that dim; None for no single thing."""
    if tuple(types) == kind.dims:
        return kind
    first = types[0]
    return first if first in (R, I, P) and all(t == first for t in types) else None


def fits_together(call: Call, strategy: Strategy, shapes: Sequence[Shape], axis: int, chosen: list[Strategy]) -> bool:
    """Whether the irregular types of a strategy fit the axis, and what was chosen for the axes before it."""
    everything = [*chosen, strategy]
    if not any(is_irregular(s.ins) or is_irregular(s.outs) for s in everything):
        return True
    ragged = [t for t in (*strategy.ins, *strategy.outs) if isinstance(t, Ragged)]
    if any(len(t.units) != call.mesh.sizes[axis] for t in ragged):
        return False
    columns = [[s.ins[i] for s in everything] for i in range(len(call.specs))]
    columns += [[s.outs[i] for s in everything] for i in range(len(shapes))]
    return all(clash(types) is None for types in columns)
