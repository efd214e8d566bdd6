"""The search: for each mesh axis a layout of the stream, for each unit the cut that fits it best.

1. For one axis at a time, and each layout that the stream may have along it (whole, cut in the first dim, which
   is mostly the batch, or in the second, mostly the sequence), every unit takes the best of its *variants*: ways to
   cut its parameters, with conversions of what it takes and gives. Units that are alike take the same. Then
   neighbours are tried together without conversions between them, for a row that follows a column in another module.
2. The results of the axes are combined; the best combinations are refined over all axes, at last by moves of single
   tensors: inputs of the model, and what crosses the borders of modules inside of units.

A rehearsal judges each candidate. Work that the ranks repeat comes first (a plan that splits it is what a mesh is
for), then memory beyond the limit, then seconds of communication to 0.1 %, then the number of collectives
that only operators ask for, then bytes that operators touch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._irregular import Interleaved
from ..placements import I, R
from .cost import Cost
from .meter import Most, TooMuch
from .rehearse import Choices, Key, Rehearsal
from .trace import Spot, Unit, Value

Score = tuple[int, int, int, int, float]
_FREE = 1.02
"""Work per rank, over an even share, up to which nothing is said."""
_KEPT = 2
"""Number of combinations of axes that are refined."""
_BEAM = 5
"""Number of choices for some axes to which another axis is added."""
_FEW = 4
"""Number of variants of a unit that are tried where another axis is added; those that were best along the first."""
_PASSES = 2
"""Most passes of a refinement over all units and axes."""


_WORST = (1 << 60, 0, 0, 0, math.inf)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to lay out a unit along one axis."""

    cuts: tuple[int, ...]
    """Per group, the number of its option."""
    taken: int | None
    """Type to which its stream inputs are moved; None leaves them."""
    given: int | None
    """Type to which its stream outputs are moved; None leaves them."""


class Search:
    """Finds choices for a model.

    Args:
        rehearsal: what judges.
        units: the model's units.
        batch: the dims of inputs that are cut at the start, by layout of the stream.
        inputs: the inputs of the model.
        fixed: axis types of the stream that the inputs have already, by axis.
        main: shape of the stream in most places.
        total_flops: work of one device.
        limit: bytes of memory of a rank, or None.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        units: Sequence[Unit],
        batch: Mapping[int, Mapping[Key, int]],
        inputs: Sequence[Spot],
        fixed: dict[int, int],
        main: tuple[int, ...],
        total_flops: float,
        limit: int | None,
    ) -> None:
        self.rehearsal, self.batch, self.inputs, self.fixed, self.main = rehearsal, batch, inputs, fixed, main
        kinds: dict[object, list[Unit]] = {}
        for unit in units:
            kinds.setdefault(unit.likeness, []).append(unit)
        self.kinds = list(kinds.values())
        self._ranked: dict[object, list[Variant]] = {}
        self.total_flops, self.limit = total_flops, limit
        self.sizes = rehearsal.mesh.sizes
        self.shapes = {n: tuple(p.shape) for n, p in rehearsal.skeleton.module.named_parameters(remove_duplicate=False)}

    # ---------------------------------------------------------------- judging

    def score(self, choices: Choices, least: Score | None = None) -> Score:
        """Lower is better; a candidate that does not run, or is found to be worse than `least`, is worst."""
        try:
            most = Most() if least is None else self._most(choices, least)
        except ValueError:  # placements of a parameter that do not go together
            return _WORST
        cost = self._cost(choices, most)
        return _WORST if cost is None else self._score(cost)

    def _cost(self, choices: Choices, most: Most) -> Cost | None:
        """What the candidate costs; None where it does not run, or costs more than `most`."""
        try:
            return self.rehearsal.cost(choices, memory=self.limit is not None, most=most)
        except TooMuch:
            return None
        except Exception:  # noqa: BLE001  (the model runs, as it did without a plan; the candidate does not)
            return None

    def _most(self, choices: Choices, least: Score) -> Most:
        """What a candidate may cost that is no worse than `least`."""
        cut = {a for types in choices.values() for a, t in enumerate(types) if t is not None and t >= 0}
        share = self.total_flops / math.prod(self.sizes)
        flops = share * (_FREE + (least[0] + 1e-3) / 10) if self.total_flops else math.inf
        if least[0] > self._repeated(self.total_flops / math.prod(self.sizes[a] for a in cut)):
            return Most(flops=flops)  # it may repeat less work, which comes first
        memory = math.inf if self.limit is None else self.limit * (1 + (least[1] + 1e-6) / 20)
        if least[1] > self._over(self.rehearsal.state(choices)[1]):
            return Most(flops=flops, memory=memory)
        return Most(1.001 ** (least[2] + 1), flops, memory)

    def _repeated(self, flops: float) -> int:
        share = flops / self.total_flops * math.prod(self.sizes) if self.total_flops else 0.0
        return math.ceil(round(max(0.0, share - _FREE) * 10, 3))

    def _over(self, memory: int) -> int:
        return 0 if self.limit is None else max(0, math.ceil(20 * (memory / self.limit - 1)))

    def _score(self, cost: Cost) -> Score:
        communication = round(math.log(cost.communication) / math.log(1.001)) if cost.communication else -(1 << 60)
        return self._repeated(cost.flops), self._over(cost.memory), communication, cost.implicit, cost.touched

    # ---------------------------------------------------------------- building candidates

    def _with(self, choices: Choices, axis: int, changes: Iterable[tuple[Key, int | None]]) -> Choices:
        """`choices` with other types along one axis."""
        new = dict(choices)
        for key, value in changes:
            types = list(new.get(key, (None,) * len(self.sizes)))
            types[axis] = value
            new[key] = tuple(types)
        return new

    def _apply(self, choices: Choices, axis: int, units: Sequence[Unit], variant: Variant) -> Choices:
        changes: list[tuple[Key, int | None]] = []
        for unit in units:
            for group, number in zip(unit.groups, variant.cuts, strict=True):
                dims = dict(group.options[number])
                names = dict.fromkeys(n for option in group.options for n, _ in option)
                changes += [(self.rehearsal.known_as(Key("parameter", n)), dims.get(n)) for n in names]
            for value in unit.inputs:
                path = () if unit.sole else value.path
                changes.append((Key("input", unit.name, path), self._fitting(value, variant.taken)))
            for value in unit.outputs:
                changes.append((Key("output", unit.name, value.path), self._fitting(value, variant.given)))
        return self._with(choices, axis, changes)

    def _fitting(self, value: Value, kind: int | None) -> int | None:
        """The type for one stream tensor: features, the last dim, are not cut by conversions, nor what has no batch."""
        shape = value.shape
        if kind is None or kind < 0:
            return kind
        if kind >= len(shape) - 1 or not (len(shape) == len(self.main) or shape[0] == self.main[0]):
            return None
        return kind if kind or shape[0] == self.main[0] else None

    def _cuts(self, unit: Unit, axis: int) -> Iterator[tuple[int, ...]]:
        """Ways to cut the parameters of a unit; neighbouring groups together where all together are too many."""
        size = self.sizes[axis]
        options = [
            [i for i, option in enumerate(group.options) if all(self._fits(n, t, size) for n, t in option)]
            for group in unit.groups
        ]
        if math.prod(map(len, options)) <= 128:
            yield from itertools.product(*options)
            return
        whole = (0,) * len(options)
        yield whole
        for i in range(len(options)):
            following = options[i + 1] if i + 1 < len(options) else [0]
            for pair in itertools.product(options[i], following):
                combined = (*whole[:i], *pair, *whole[i + 2 :])
                yield combined[: len(options)]

    def _fits(self, name: str, kind: int, size: int) -> bool:
        """Whether all ranks get something; blocks are to be cut evenly."""
        if isinstance(kind, Interleaved):
            return self.shapes[name][kind.dim] % (kind.blocks * size) == 0
        return self.shapes[name][kind] >= size

    def _variants(self, unit: Unit, axis: int, stream: int) -> Iterator[Variant]:
        whole = (0,) * len(unit.groups)
        yield Variant(whole, None, stream)
        if stream >= 0 and unit.outputs:
            yield Variant(whole, None, R)  # what follows takes all of it, perhaps several times
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
            whole = self._with(whole, axis, self.batch.get(stream, {}).items())
        for units in self.kinds:
            whole = self._apply(whole, axis, units, Variant((0,) * len(units[0].groups), None, stream))
        choices = whole
        for units in self.kinds:
            choices = self._best_for(choices, axis, units, stream, few=bool(base))
        choices = self._join_neighbours(choices, axis, stream)
        return [choices] if stream < 0 else [choices, whole]

    def _best_for(
        self, choices: Choices, axis: int, units: Sequence[Unit], stream: int, *, few: bool = False
    ) -> Choices:
        """Give units that are alike the best of their variants along an axis."""
        unit = units[0]
        if not (unit.groups or unit.inputs):
            return choices
        known = self._ranked.get((unit.likeness, stream)) if few else None
        if known:
            fitting = set(self._cuts(unit, axis))
            known = [v for v in known if v.cuts in fitting]
        best, least, scores = choices, self.score(choices), []
        for variant in known or self._variants(unit, axis, stream):
            candidate = self._apply(choices, axis, units, variant)
            score = self.score(candidate, least)
            scores.append((score, variant))
            if score < least:
                best, least = candidate, score
        if not few:
            scores.sort(key=lambda x: x[0])
            self._ranked.setdefault((unit.likeness, stream), [v for _, v in scores[:_FEW]])
        return best

    def _best(self, choices: Choices, candidates: Iterable[Choices]) -> Choices:
        """The best of some candidates; `choices` where none is better."""
        best, least = choices, self.score(choices)
        for candidate in candidates:
            score = self.score(candidate, least)
            if score < least:
                best, least = candidate, score
        return best

    def _join_neighbours(self, choices: Choices, axis: int, stream: int) -> Choices:
        """Try units that follow each other without conversions between them."""
        for first, second in itertools.pairwise(self.kinds):
            a, b = first[0], second[0]
            if len(a.groups) == len(b.groups) == 1 and a.outputs and b.inputs:
                choices = self._best(choices, self._joined(choices, axis, stream, first, second))
        return choices

    def _joined(
        self, choices: Choices, axis: int, stream: int, first: Sequence[Unit], second: Sequence[Unit]
    ) -> Iterator[Choices]:
        for a, b in itertools.product(self._cuts(first[0], axis), self._cuts(second[0], axis)):
            if any(a) and any(b):
                for taken in (None, R) if stream >= 0 else (None,):
                    one = self._apply(choices, axis, first, Variant(a, taken, None))
                    yield self._apply(one, axis, second, Variant(b, None, stream))

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
        return self._without_idle(self._touched_up(min(refined, key=self.score)))

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
                for units in self.kinds:
                    choices = self._best_for(choices, axis, units, stream)
            if choices is before:
                break
        return choices

    def _touched_up(self, choices: Choices) -> Choices:
        """Move single tensors: whole ones to whom they are parts of a sum, inputs along any dim of the stream."""
        axes = [a for a in range(len(self.sizes)) if self.sizes[a] > 1]
        for axis, units in itertools.product(axes, self.kinds):
            for same in zip(*(u.spots for u in units), strict=True):
                keys = [Key(s.section, s.name, s.value.path) for s in same]
                choices = self._best(choices, (self._with(choices, axis, [(k, t) for k in keys]) for t in (R, I)))
        for axis, spot in itertools.product([a for a in axes if a not in self.fixed], self.inputs):
            key, dims = Key("input", "", spot.value.path), range(min(2, len(spot.value.shape)))
            choices = self._best(choices, (self._with(choices, axis, [(key, t)]) for t in (I, *dims)))
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
