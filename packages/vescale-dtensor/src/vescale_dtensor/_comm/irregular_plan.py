"""Plans that irregular cuts take part in: reduce, then one exchange, then what is local.

Every rank comes to the same steps, because they follow from the types alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._irregular import Interleaved, Ragged, cut_dims_of, is_cut
from .._mesh import Axes
from .._spec import Spec
from ..placements import I, P, R
from .irregular import LocalCopy, PieceExchange, PieceReduceScatter
from .steps import AllReduce, KeepFirst, Relabel, Step


def irregular_steps(source: Spec, target: Spec) -> list[Step]:
    """Steps from `source` to `target`, one of which has an irregular axis type."""
    planner = _Planner(source, target)
    planner.reduce()
    planner.exchange()
    planner.keep_first()
    if not planner.steps and source is not target:
        planner.steps.append(Relabel())
    return planner.steps


class _Planner:
    """Builds the steps; `types` is the layout reached so far. Axes of one rank follow with the first local step."""

    def __init__(self, source: Spec, target: Spec) -> None:
        self.source, self.target, self.goal = source, target, target.types
        self.mesh = source.mesh
        self.wide = [a for a in range(self.mesh.ndim) if self.mesh.sizes[a] > 1]
        self.types = list(source.types)
        self.steps: list[Step] = []

    @property
    def here(self) -> Spec:
        return self.source.with_types(tuple(self.types))

    def _affected(self, changed: Iterable[int], goal: list[int]) -> set[int]:
        """Axes whose cut keeps its type but moves, because one of several ranks that cuts before it changes."""
        return {
            a
            for a in self.wide
            if is_cut(self.types[a])
            and self.types[a] == goal[a]
            and any(
                _cuts_before(t, c, self.types[a], a)
                for c in changed
                if c in self.wide
                for t in (self.types[c], goal[c])
            )
        }

    def reduce(self) -> None:
        """All sums that are no longer pending: in one reduce-scatter where nothing else moves, else an all-reduce."""
        partial = [a for a in self.wide if self.types[a] == P and self.goal[a] != P]
        if not partial:
            return
        goal = list(self.types)
        for a in partial:
            goal[a] = self.goal[a]
        axes = tuple(partial)
        if all(is_cut(goal[a]) for a in partial) and not self._affected(partial, goal) and self._stays(partial):
            start, self.types = self.here, goal
            self.steps.append(PieceReduceScatter(start, self.here, axes))
            return
        self.steps.append(AllReduce(self.mesh, axes))
        for a in partial:
            self.types[a] = self.goal[a] if self.goal[a] in (I, R) else I

    def _stays(self, partial: list[int]) -> bool:
        """Whether the other axes that cut lie as they should already: else the cuts may not fit together meanwhile."""
        return all(
            self.types[a] == self.goal[a] or not (is_cut(self.types[a]) or is_cut(self.goal[a]))
            for a in range(self.mesh.ndim)
            if a not in partial
        )

    def exchange(self) -> None:
        """One collective for everything that is cut otherwise afterwards, none where all is at hand."""
        fill = [a for a in self.wide if self.goal[a] == P and is_cut(self.types[a])]
        others = [a for a in range(self.mesh.ndim) if self._moves(a, self.goal[a]) and a not in fill]
        pads = bool(fill) and not others and not self._affected(fill, list(self.goal))
        goal = list(self.goal)
        for a in self.wide:
            if goal[a] == P and self.types[a] != P and not (pads and a in fill):
                goal[a] = I if is_cut(self.types[a]) else self.types[a]
        start = self.here
        changed = [a for a in range(self.mesh.ndim) if self._moves(a, goal[a])]
        gone = set(changed) | self._affected(changed, goal)
        axes: Axes = tuple(a for a in self.wide if a in gone and is_cut(self.types[a]))
        self.types = goal
        end = self.here
        if pads or (changed and not axes):
            self.steps.append(LocalCopy(start, end))
        elif axes:
            self.steps.append(PieceExchange(start, end, axes))

    def _moves(self, axis: int, to: int) -> bool:
        return self.types[axis] != to and (is_cut(self.types[axis]) or is_cut(to))

    def keep_first(self) -> None:
        """Whole values that become pending sums: one rank keeps them."""
        keep = tuple(a for a in self.wide if self.goal[a] == P and self.types[a] != P)
        if keep:
            self.steps.append(KeepFirst(self.mesh, keep))


def _cuts_before(one: int, at: int, other: int, other_at: int) -> bool:
    """Whether a cut on axis `at` decides what is left for the cut `other` on axis `other_at`."""
    if isinstance(one, Ragged):
        return isinstance(other, Ragged) and at < other_at
    dims = cut_dims_of(one)
    if isinstance(other, Ragged):
        return any(d < other.lead for d in dims)
    if isinstance(other, Interleaved):
        return other.dim in dims and at < other_at
    return other in dims and at < other_at


__all__ = ["irregular_steps"]
