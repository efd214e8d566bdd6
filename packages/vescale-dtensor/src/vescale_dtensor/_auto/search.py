"""The search: for each mesh axis a layout of the stream, for each unit the cut that fits it best.

1. For one axis at a time, and each layout that the stream may have along it (whole, cut in the first dim, which
   is the batch, or in the second, which is the sequence), every unit takes the best of its *variants*: ways to cut
   its parameters, with conversions of what it takes and gives. Then neighbours are tried together without
   conversions between them, for a row that follows a column in another module.
2. The results of the axes are combined; the best combinations are refined over all axes.

A rehearsal judges each candidate. Work that the ranks repeat comes first (a plan that splits it is what a mesh is
for), then memory beyond the limit, then seconds of communication to 0.1 %, then the number of collectives
that only operators ask for, then bytes that operators touch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .._irregular import Interleaved
from ..placements import I, R
from .cost import Cost
from .rehearse import Choices, Key, Rehearsal
from .trace import Option, Unit, Value

Score = tuple[int, int, int, int, float]
_FREE = 1.1
"""Work per rank, over an even share, up to which nothing is said."""
_KEPT = 2
"""Number of combinations of axes that are refined."""
_BEAM = 5
"""Number of choices for some axes to which another axis is added."""
_PASSES = 2
"""Most passes of a refinement over all units and axes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to lay out a unit along one axis."""

    cuts: tuple[Option, ...]
    """Per group, the parameters that are cut."""
    taken: int | None
    """Type to which its stream inputs are moved; None leaves them."""
    given: int | None
    """Type to which its stream outputs are moved; None leaves them."""


class Search:
    """Finds choices for a model.

    Args:
        rehearsal: what judges.
        units: the model's units.
        batch: keys of the inputs and the dims of theirs that may be cut, by layout of the stream.
        fixed: axis types of the stream that the inputs have already, by axis.
        total_flops: work of one device.
        limit: bytes of memory of a rank, or None.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        units: Sequence[Unit],
        batch: dict[int, list[Key]],
        fixed: dict[int, int],
        total_flops: float,
        limit: int | None,
    ) -> None:
        self.rehearsal, self.units, self.batch, self.fixed = rehearsal, list(units), batch, fixed
        self.total_flops, self.limit = total_flops, limit
        self.sizes = rehearsal.mesh.sizes
        self.shapes = {n: tuple(p.shape) for n, p in rehearsal.skeleton.module.named_parameters(remove_duplicate=False)}

    # ---------------------------------------------------------------- judging

    def score(self, choices: Choices) -> Score:
        """Lower is better; a candidate that does not run is worst."""
        try:
            cost = self.rehearsal.cost(choices, memory=self.limit is not None)
        except Exception:  # noqa: BLE001  (the model runs, as it did without a plan; the candidate does not)
            return (1 << 60, 0, 0, 0, math.inf)
        return self._score(cost)

    def _score(self, cost: Cost) -> Score:
        share = cost.flops / self.total_flops * math.prod(self.sizes) if self.total_flops else 0.0
        repeated = math.ceil(round(max(0.0, share - _FREE) * 10, 3))
        over = 0
        if self.limit is not None and cost.memory > self.limit:
            over = math.ceil(20 * (cost.memory / self.limit - 1))
        communication = round(math.log(cost.communication) / math.log(1.001)) if cost.communication else -(1 << 60)
        return repeated, over, communication, cost.implicit, cost.touched

    # ---------------------------------------------------------------- building candidates

    def _with(self, choices: Choices, axis: int, changes: Iterable[tuple[Key, int | None]]) -> Choices:
        """`choices` with other types along one axis."""
        new = dict(choices)
        for key, value in changes:
            types = list(new.get(key, (None,) * len(self.sizes)))
            types[axis] = value
            new[key] = tuple(types)
        return new

    def _apply(self, choices: Choices, axis: int, unit: Unit, variant: Variant) -> Choices:
        changes: list[tuple[Key, int | None]] = []
        for group, cut in zip(unit.groups, variant.cuts, strict=True):
            dims = dict(cut)
            names = dict.fromkeys(n for option in group.options for n, _ in option)
            changes += [(self.rehearsal.known_as(Key("parameter", n)), dims.get(n)) for n in names]
        for value in unit.inputs:
            path = () if unit.sole else value.path
            changes.append((Key("input", unit.name, path), _fitting(value, variant.taken)))
        for value in unit.outputs:
            changes.append((Key("output", unit.name, value.path), _fitting(value, variant.given)))
        return self._with(choices, axis, changes)

    def _cuts(self, unit: Unit, axis: int) -> Iterator[tuple[Option, ...]]:
        """Ways to cut the parameters of a unit; neighbouring groups together where all together are too many."""
        size = self.sizes[axis]
        options = [[o for o in g.options if all(self._fits(n, t, size) for n, t in o)] for g in unit.groups]
        if math.prod(map(len, options)) <= 128:
            yield from itertools.product(*options)
            return
        whole: tuple[Option, ...] = ((),) * len(options)
        yield whole
        for i in range(len(options)):
            following = options[i + 1] if i + 1 < len(options) else [()]
            for pair in itertools.product(options[i], following):
                combined = (*whole[:i], *pair, *whole[i + 2 :])
                yield combined[: len(options)]

    def _fits(self, name: str, kind: int, size: int) -> bool:
        """Whether all ranks get something; blocks are to be cut evenly."""
        if isinstance(kind, Interleaved):
            return self.shapes[name][kind.dim] % (kind.blocks * size) == 0
        return self.shapes[name][kind] >= size

    def _variants(self, unit: Unit, axis: int, stream: int) -> Iterator[Variant]:
        whole: tuple[Option, ...] = ((),) * len(unit.groups)
        yield Variant(whole, None, stream)
        taken = R if stream >= 0 else None
        for cuts in self._cuts(unit, axis):
            if any(cuts):
                yield Variant(cuts, taken, stream)
                if len(cuts) == 1:  # what follows may take it as it is
                    yield Variant(cuts, taken, None)
        if unit.inputs and unit.outputs and unit.groups:  # rows of another dim: no parameter needs to be cut
            for dim in (0, 1):
                if dim != stream:
                    yield Variant(whole, dim, stream)

    # ---------------------------------------------------------------- one axis

    def streams(self, axis: int) -> list[int]:
        """Layouts that the stream may have along an axis."""
        if axis in self.fixed:
            return [self.fixed[axis]]
        return [] if self.sizes[axis] == 1 else [I, *self.batch]

    def along(self, base: Choices, axis: int, stream: int) -> list[Choices]:
        """Add one axis to choices for others: with whole parameters, and with every unit at its best."""
        whole = base
        if axis not in self.fixed:
            whole = self._with(whole, axis, [(k, stream) for k in self.batch.get(stream, ())])
        for unit in self.units:
            whole = self._apply(whole, axis, unit, Variant(((),) * len(unit.groups), None, stream))
        choices = whole
        for unit in self.units:
            choices = self._best_for(choices, axis, unit, stream)
        choices = self._join_neighbours(choices, axis, stream)
        return [choices] if stream < 0 else [choices, whole]

    def _best_for(self, choices: Choices, axis: int, unit: Unit, stream: int) -> Choices:
        """Give a unit the best of its variants along an axis."""
        if not (unit.groups or unit.inputs):
            return choices
        best, least = choices, self.score(choices)
        for variant in self._variants(unit, axis, stream):
            candidate = self._apply(choices, axis, unit, variant)
            score = self.score(candidate)
            if score < least:
                best, least = candidate, score
        return best

    def _join_neighbours(self, choices: Choices, axis: int, stream: int) -> Choices:
        """Try units that follow each other without conversions between them."""
        best = self.score(choices)
        for first, second in itertools.pairwise(self.units):
            if len(first.groups) == len(second.groups) == 1 and first.outputs and second.inputs:
                for a, b in itertools.product(self._cuts(first, axis), self._cuts(second, axis)):
                    if not (any(a) and any(b)):
                        continue
                    for taken in (None, R) if stream >= 0 else (None,):
                        candidate = self._apply(choices, axis, first, Variant(a, taken, None))
                        candidate = self._apply(candidate, axis, second, Variant(b, None, stream))
                        score = self.score(candidate)
                        if score < best:
                            best, choices = score, candidate
        return choices

    # ---------------------------------------------------------------- all axes

    def run(self) -> Choices:
        """The best choices found."""
        axes = range(len(self.sizes))
        orders = [list(axes)]
        if len({(self.sizes[a], self._link(a), self.fixed.get(a)) for a in axes}) > 1:
            orders.append(list(reversed(axes)))
        found = [end for order in orders for end in self._ends(order)]
        found.sort(key=lambda x: self.score(x[0]))
        refined = [self._refined(choices, streams) for choices, streams in found[:_KEPT]]
        return self._without_idle(min(refined, key=self.score))

    def _ends(self, order: Sequence[int]) -> list[tuple[Choices, dict[int, int]]]:
        """Choices for all axes, added one after the other, with the layouts of the stream by axis.

        Layouts come in one order, the batch first; the axes come in both, where they differ.
        """
        rank = {stream: i for i, stream in enumerate((*self.batch, I))}
        states: list[tuple[Choices, dict[int, int]]] = [({}, {})]
        for axis in order:
            streams = self.streams(axis)
            if streams:
                states = [
                    (choices, {**before, axis: stream})
                    for base, before in sorted(states, key=lambda x: self.score(x[0]))[:_BEAM]
                    for stream in streams
                    if axis in self.fixed or all(rank[s] <= rank[stream] or a in self.fixed for a, s in before.items())
                    for choices in self.along(base, axis, stream)
                ]
        return states

    def _link(self, axis: int) -> object:
        machine = self.rehearsal.machine
        return machine.links.get(self.rehearsal.mesh.axis_name(axis), machine.link)

    def _refined(self, choices: Choices, streams: dict[int, int]) -> Choices:
        """Let every unit choose once more along every axis, now that the others are decided."""
        for _ in range(_PASSES):
            before = choices
            for axis, stream in streams.items():
                for unit in self.units:
                    choices = self._best_for(choices, axis, unit, stream)
            if choices is before:
                break
        return choices

    def _without_idle(self, choices: Choices) -> Choices:
        """Drop conversions that change nothing, so that the plan says what matters."""
        best = self.score(choices)
        for key in [k for k in choices if k.section != "parameter"]:
            for axis, kind in enumerate(choices[key]):
                if kind is not None:
                    candidate = self._with(choices, axis, [(key, None)])
                    if self.score(candidate) <= best:
                        choices = candidate
        return choices


def _fitting(value: Value, kind: int | None) -> int | None:
    """The type for one stream tensor: features, the last dim, are never cut by a conversion."""
    if kind is None or kind < 0:
        return kind
    return kind if kind < len(value.shape) - 1 else None
