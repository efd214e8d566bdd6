"""All that runs one kind of graph: its ranks, and their calls for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._plan import PipePlan
from .._schedule import Kind, Schedule
from .._schedule.lower import lower
from .._transport import Transport
from ..errors import PipeError, ScheduleError
from .batch import Batch, merge
from .calls import make_calls, tags_of
from .losses import LossRule
from .rank import Calls, Rank
from .wiring import GraphLike, Wiring

__all__ = ["Form"]


class Form:
    """Ranks of this process for graphs that have the same messages.

    Args:
        schedule: of training, as `fit` gives it.
        wiring: messages, as `fit` gives them.
        graph: one of the graphs.
        transports: of the ranks of this process.
        losses: how losses are made and weighted.
        plan: of the engine.
        loss_everywhere: whether all ranks get the loss.
        schedules: returns the schedule for a number of micro-batches and of stages.
        tied: how gradients of tied parameters are added; see `Rank`.

    Raises:
        ScheduleError: the schedule does not run the model.
    """

    def __init__(
        self,
        schedule: Schedule,
        wiring: Wiring,
        graph: GraphLike,
        transports: Sequence[Transport],
        losses: LossRule,
        plan: PipePlan,
        loss_everywhere: bool,
        schedules: Callable[[int, int], Schedule],
        tied: str,
    ) -> None:
        self._everywhere = loss_everywhere
        self._schedules = schedules
        self._name = schedule.name
        self._trains = any(bool((rows.kind != int(Kind.F)).any()) for rows in schedule.columns)
        self.wiring = wiring
        self.ranks = [
            Rank(
                graph,
                self.wiring,
                schedule.placement,
                transport.rank,
                transport,
                losses,
                tied=tied,
                ahead=plan.receive_ahead,
                added=plan.added_losses,
                seeded=plan.seed is not None,
            )
            for transport in transports
        ]
        program = lower(schedule, self.wiring.edges, grad_edges=self.wiring.grad_edges)
        self._graph = graph
        self._made = {
            (True, schedule.num_microbatches): [
                make_calls(rank, program, training=True, base=1, loss_everywhere=loss_everywhere) for rank in self.ranks
            ]
        }
        # Tags of their own for forwards only, so that messages of both keep their layouts from step to step.
        self._base = tags_of(self.ranks[0], program, 1).end

    def calls(self, training: bool, microbatches: int) -> list[Calls]:
        """Return what the ranks of this process do.

        Args:
            training: whether gradients are made.
            microbatches: of the step.

        Raises:
            ScheduleError: gradients are to be made, and the schedule has forwards only.
        """
        if training and not self._trains:
            raise ScheduleError(
                f"schedule {self._name!r} has forwards only, so it makes no gradients: take one with backwards, or "
                "call eval_step."
            )
        found = self._made.get((training, microbatches))
        if found is None:
            schedule = self._schedules(microbatches, len(self._graph.stages))
            program = lower(schedule, self.wiring.edges, grad_edges=self.wiring.grad_edges, backward=training)
            found = self._made[training, microbatches] = [
                make_calls(rank, program, training=training, base=self._base, loss_everywhere=self._everywhere)
                for rank in self.ranks
            ]
        return found

    def finish(self, batch: Batch, graphs: Sequence[GraphLike]) -> tuple[Tensor | None, Any]:
        """Return loss and outputs of a step.

        Args:
            batch: of the step.
            graphs: per micro-batch.
        """
        outputs = None
        for rank in self.ranks:
            if rank.has_last and rank.results and rank.results[0]:
                outputs = _outputs(rank, batch, graphs)
            rank.results = []
        return self.ranks[0].loss, outputs


def _outputs(rank: Rank, batch: Batch, graphs: Sequence[GraphLike]) -> Any:
    """Return what the model would have returned for the whole batch, as far as that can be told."""
    counts = [len(one) for one in rank.results]
    if len(set(counts)) > 1:
        raise PipeError(
            f"the model returned {counts} tensors for the micro-batches of one step, which cannot be put together; "
            "return the same for all, or say PipePlan(keep_outputs=False)."
        )
    merged = merge(rank.results, batch.sizes)
    place = next(iter(rank.loss_places)) if len(rank.loss_places) == 1 else None
    if place is not None:
        # The loss of the model is that of the batch, with the weights of its micro-batches, not one each.
        merged[place] = rank.own_loss
    return graphs[0].unflatten_outputs(merged)
