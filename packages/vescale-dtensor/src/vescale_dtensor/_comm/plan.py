"""Plans: the shortest list of steps that takes a tensor from one layout to another.

A plan never works axis by axis where one collective serves:

1. *slice*: I, R to S where it is local, so that later steps move less;
2. *reduce*: all P to S axes in one reduce-scatter, all P to I, R axes in one all-reduce;
3. *exchange*: everything that changes between S and S, I, R in one collective (an all-gather
   where all blocks go everywhere, else an all-to-all), for any nesting of axes in one dim;
4. *fill*: S, I, R to P, local.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .._irregular import Ragged
from .._mesh import Axes
from .._spec import Spec, contiguous_stride
from ..placements import AxisTypes, I, P, R
from .irregular import LocalCopy
from .irregular_plan import irregular_steps
from .steps import AllGather, AllReduce, Exchange, KeepFirst, Pad, ReduceScatter, Relabel, Slice, Step


@dataclass(frozen=True, slots=True)
class Plan:
    """How to get from one spec to another."""

    source: Spec
    target: Spec
    stride: tuple[int, ...]
    """Strides of a local part of the source that lies in memory in the usual order."""
    steps: tuple[Step, ...]
    """What to run in order; empty where the local data are already right."""
    kind: str
    """``alias`` (only axes of one rank change), ``relabel`` (I, R only), ``cast`` (I to R), ``reduce`` (P to I),
    else ``general``."""
    axes: Axes
    """Axes of more than one rank that change."""
    reducer: AllReduce | None
    """What sums the gradients of a ``cast``."""
    ordered: bool = True
    """Whether dims keep their order in memory; what a ragged shard flattens lies in the usual order."""


def plan(source: Spec, types: AxisTypes) -> Plan:
    """Return the cached plan from `source` to `types`."""
    found: Plan | None = source.plans.get(types)
    if found is None:
        found = source.plans[types] = _make(source, source.with_types(types))
    return found


def _make(source: Spec, target: Spec) -> Plan:
    sizes = source.mesh.sizes
    axes = tuple(a for a, (s, t) in enumerate(zip(source.types, target.types, strict=True)) if s != t and sizes[a] > 1)
    kind = _kind({(source.types[a], target.types[a]) for a in axes})
    ordered = True
    if source.irregular or target.irregular:
        steps = irregular_steps(source, target)
        if kind != "general" and any(isinstance(s, LocalCopy) for s in steps):  # an axis of one rank changes the shape
            kind = "general"
        ordered = not any(isinstance(t, Ragged) for t in (*source.types, *target.types))
    else:
        steps = _Planner(source, target).steps
    reducer = AllReduce(source.mesh, axes) if kind == "cast" else None
    return Plan(source, target, contiguous_stride(source.local_shape), tuple(steps), kind, axes, reducer, ordered)


def _kind(pairs: set[tuple[int, int]]) -> str:
    if not pairs:
        return "alias"
    if pairs == {(I, R)}:
        return "cast"
    if pairs == {(P, I)}:
        return "reduce"
    if all(s in (I, R) and t in (I, R) for s, t in pairs):
        return "relabel"
    return "general"


class _Planner:
    """Builds the steps; `types` is the layout reached so far. Axes of one rank change for free."""

    def __init__(self, source: Spec, target: Spec) -> None:
        self.source, self.target = source, target
        self.wide = [a for a in range(source.mesh.ndim) if source.mesh.sizes[a] > 1]
        self.types = list(source.types)
        self.steps: list[Step] = []
        for axis in range(source.mesh.ndim):
            if axis not in self.wide:
                self.types[axis] = target.types[axis]
        self._slice()
        self._reduce()
        self._exchange()
        self._fill()
        if not self.steps and source is not target:
            self.steps.append(Relabel())

    @property
    def here(self) -> Spec:
        return self.source.with_types(tuple(self.types))

    def _changed(self, axis: int) -> bool:
        return self.types[axis] != self.target.types[axis]

    def _alone(self, axis: int, dim: int, together: Collection[int] = ()) -> bool:
        """Whether cutting `dim` along `axis` leaves its cuts by axes other than `together` where they are."""
        for other in self.wide:
            if other == axis or other in together:
                continue
            now, then = self.types[other] == dim, self.target.types[other] == dim
            if now != then or (now and other > axis):
                return False
        return True

    def _slice(self) -> None:
        start = self.here
        for axis in self.wide:
            to = self.target.types[axis]
            if self.types[axis] in (I, R) and to >= 0 and self._alone(axis, to):
                self.types[axis] = to
        if self.here is not start:
            self.steps.append(Slice(start, self.here))

    def _reduce(self) -> None:
        partial = [a for a in self.wide if self.types[a] == P and self._changed(a)]
        goal = self.target.types
        scatter = tuple(
            a for a in partial if goal[a] >= 0 and self._alone(a, goal[a], [b for b in partial if goal[b] == goal[a]])
        )
        if scatter:
            start = self.here
            for axis in scatter:
                self.types[axis] = self.target.types[axis]
            self.steps.append(ReduceScatter(start, self.here, scatter))
        rest = tuple(a for a in partial if a not in scatter)
        if rest:
            self.steps.append(AllReduce(self.source.mesh, rest))
            for axis in rest:
                self.types[axis] = self.target.types[axis] if self.target.types[axis] in (I, R) else I
        # What could not be scattered (another axis cuts the same dim) is now whole and cut by the exchange.

    def _exchange(self) -> None:
        goal = [
            t if t != P else (I if self._changed(a) and self._nested(a) else self.types[a])
            for a, t in enumerate(self.target.types)
        ]
        for axis in self.wide:  # S to P where the dim is cut once: the block is padded, not gathered
            if self.target.types[axis] == P and self.types[axis] in (I, R):
                goal[axis] = self.types[axis]
        moving = [a for a in self.wide if self.types[a] != goal[a] and not {self.types[a], goal[a]} <= {I, R}]
        if not moving:
            for axis in self.wide:
                self.types[axis] = goal[axis]
            return
        touched = {t for a in moving for t in (self.types[a], goal[a]) if t >= 0}
        outermost = {d: min(a for a in moving if d in (self.types[a], goal[a])) for d in touched}
        axes = tuple(
            a for a in self.wide
            if self.types[a] >= 0 and (a in moving or (self.types[a] in touched and a > outermost[self.types[a]]))
        )  # fmt: skip
        start = self.here
        self.types = goal
        end = self.here
        if not axes:
            self.steps.append(Slice(start, end))
        elif all(end.types[a] in (I, R) for a in axes) and _covers(start, end, axes):
            self.steps.append(AllGather(start, end, axes))
        else:
            self.steps.append(Exchange(start, end, axes))

    def _nested(self, axis: int) -> bool:
        return self.types[axis] >= 0 and any(
            other != axis and self.types[axis] in (self.types[other], self.target.types[other]) for other in self.wide
        )

    def _fill(self) -> None:
        start = self.here
        for axis in self.wide:
            if self.target.types[axis] == P and self.types[axis] >= 0:
                self.types[axis] = P
        if self.here is not start:
            self.steps.append(Pad(start, self.here))
        keep = tuple(a for a in self.wide if self.target.types[a] == P and self.types[a] in (I, R))
        if keep:
            self.steps.append(KeepFirst(self.source.mesh, keep))
        self.types = list(self.target.types)


def _covers(start: Spec, end: Spec, axes: Axes) -> bool:
    """Whether every block of the group lies inside this rank's final block, so that gathering sends nothing in vain."""
    offset, length = end.local_offset, end.local_shape
    for coordinate in start.mesh.members(axes):
        box_offset, box_length = start.box_of(coordinate)
        for o, n, bo, bn in zip(offset, length, box_offset, box_length, strict=True):
            if bn and (bo < o or bo + bn > o + n):
                return False
    return True
