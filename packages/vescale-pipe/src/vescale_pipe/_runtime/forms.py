"""Graphs that have the same messages share what runs them; micro-batches of one step may have different graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._plan import PipePlan
from .._schedule import Schedule
from .._transport import Transport
from .form import Form
from .losses import LossRule
from .order import fit
from .wiring import GraphLike, Wiring

__all__ = ["Forms"]


class Forms:
    """Makes forms, and keeps them.

    Args:
        transports: of the ranks of this process.
        losses: how losses are made and weighted.
        plan: of the engine.
        loss_everywhere: whether all ranks get the loss.
        schedules: returns the schedule for a number of micro-batches and of stages.
        tied: how gradients of tied parameters are added; see `Rank`.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        losses: LossRule,
        plan: PipePlan,
        loss_everywhere: bool,
        schedules: Callable[[int, int], Schedule],
        tied: str,
    ) -> None:
        self._transports = transports
        self._losses = losses
        self._plan = plan
        self._everywhere = loss_everywhere
        self._schedules = schedules
        self._tied = tied
        self.made: dict[tuple[tuple[tuple[int, int], ...], ...], Form] = {}
        """By the edges of their messages, and those on which gradients come back."""
        self._known: dict[tuple[int, ...], tuple[Form, dict[int, Wiring]]] = {}
        self._kept: list[GraphLike] = []

    def of(self, graphs: Sequence[GraphLike]) -> tuple[Form, list[Wiring]]:
        """Return what runs some graphs, and the messages of each.

        Args:
            graphs: per micro-batch of a step.

        Raises:
            ScheduleError: the schedule does not run them.
        """
        distinct = {id(graph): graph for graph in graphs}
        key = tuple(distinct)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._make(list(distinct.values()))
            self._kept += distinct.values()
        form, wirings = found
        return form, [wirings[id(graph)] for graph in graphs]

    def _make(self, graphs: Sequence[GraphLike]) -> tuple[Form, dict[int, Wiring]]:
        plan = self._plan
        schedule = self._schedules(plan.num_microbatches, len(graphs[0].stages))
        schedule, wirings = fit(schedule, graphs, chained=plan.seed is not None)
        key = (wirings[0].edges, wirings[0].grad_edges)
        form = self.made.get(key)
        if form is None:
            form = self.made[key] = Form(
                schedule,
                wirings[0],
                graphs[0],
                self._transports,
                self._losses,
                plan,
                self._everywhere,
                self._schedules,
                self._tied,
            )
        return form, {id(graph): wiring for graph, wiring in zip(graphs, wirings, strict=True)}
