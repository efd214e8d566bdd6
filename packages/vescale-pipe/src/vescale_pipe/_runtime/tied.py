"""Parameters that several stages share: their gradients are added up, and all copies get the sum.

"exact": per micro-batch, latest stage first, then over micro-batches in their order, as autograd adds them on one
device. "fast": each stage adds up its own, and the sums are added once at the end of the step; last bits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._schedule import Kind, Schedule
from .._schedule._table import first_places, make_table
from .._schedule._waits import edge_waits, join, own_waits, walk
from .._transport import Receiving, Transport
from .stage import StageRunner
from .tags import Tags
from .wiring import GraphLike

__all__ = ["TiedGroup", "TiedRank", "settle_points", "tied_groups"]


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """One parameter in several stages."""

    number: int
    """Of the group."""
    members: tuple[tuple[int, str], ...]
    """(stage, name of the parameter), from the latest stage to the earliest, which adds up."""
    ranks: tuple[int, ...]
    """Rank of each member."""

    @property
    def owner(self) -> int:
        """Rank that adds up."""
        return self.ranks[-1]


class TiedRank:
    """One rank's part in one group.

    Args:
        group: the group.
        params: this rank's members: place in `group.members` to parameter.
        stages: this rank's stages by number.
        transport: of this rank.
        exact: per micro-batch, or once a step.
    """

    def __init__(
        self,
        group: TiedGroup,
        params: dict[int, Tensor],
        stages: dict[int, StageRunner],
        transport: Transport,
        exact: bool,
    ) -> None:
        self.group = group
        self.exact = exact
        self.owns = transport.rank == group.owner
        self._params = params
        self._transport = transport
        self._distinct = list({id(param): param for param in params.values()}.values())
        self._apart = (
            {
                place: stages[group.members[place][0]].capture(group.members[place][1], param)
                for place, param in params.items()
            }
            if exact
            else {}
        )
        self._held: list[Tensor | None] = []
        self._came: list[Tensor | None] = []
        self._expected: dict[int, list[tuple[int, Receiving]]] = {}

    def begin(self) -> None:
        """Put gradients of earlier steps aside."""
        self._expected.clear()
        self._came.clear()
        if not self.exact:
            self._held = [param.grad for param in self._distinct]
            for param in self._distinct:
                param.grad = None

    def part(self, place: int, microbatch: int) -> Tensor | None:
        """Return this rank's part of one micro-batch, for the rank that adds up."""
        return self._apart[place].pop(microbatch, None)

    def expect(self, microbatch: int, tags: Tags) -> None:
        """Ask for the parts of other ranks."""
        if microbatch in self._expected:
            return
        self._expected[microbatch] = [
            (place, self._transport.recv(rank, tags.tied(self.group.number, place, microbatch)))
            for place, rank in enumerate(self.group.ranks)
            if rank != self._transport.rank
        ]

    def ready(self, microbatch: int, tags: Tags) -> bool:
        """Return whether `settle` would not wait."""
        self.expect(microbatch, tags)
        return all(expected.ready() for _, expected in self._expected[microbatch])

    def settle(self, microbatch: int, tags: Tags) -> None:
        """Add the gradient of one micro-batch."""
        self.expect(microbatch, tags)
        came = {place: expected.wait()[0] for place, expected in self._expected.pop(microbatch)}
        total: Tensor | None = None
        for place in range(len(self.group.members)):
            part = came[place] if place in came else self._apart[place].pop(microbatch, None)
            if part is not None:
                total = part if total is None else total + part
        if total is not None:
            _accumulate(self._own(), total)

    def others(self) -> list[int]:
        """Return the ranks of other members, each once."""
        return sorted(set(self.group.ranks) - {self.group.owner})

    def collect_message(self, message: list[Any]) -> None:
        """For "fast", on the rank that adds up: keep the sum of another rank."""
        self._came.extend(message)

    def add_up(self) -> None:
        """For "fast", on the rank that adds up: add all sums of this step, then what was put aside."""
        total: Tensor | None = None
        for part in (*self._came, *(param.grad for param in self._distinct)):
            if part is not None:
                total = part if total is None else total + part
        self._came.clear()
        for param, held in zip(self._distinct, self._held, strict=True):
            param.grad = held
        if total is not None:
            _accumulate(self._own(), total)

    def partial(self) -> Tensor | None:
        """For "fast", on other ranks: return the sum of this step."""
        total: Tensor | None = None
        for param in self._distinct:
            if param.grad is not None:
                total = param.grad if total is None else total + param.grad
        return total

    def _own(self) -> Tensor:
        return self._params[len(self.group.members) - 1]

    def result(self) -> Tensor | None:
        """On the rank that adds up: return the gradient that all members get."""
        return self._own().grad

    def spread(self) -> None:
        """On the rank that adds up: give the gradient to the other members of this rank."""
        own = self._own()
        for param in self._distinct:
            if param is not own:
                param.grad = None if own.grad is None else own.grad.clone()

    def take_message(self, message: list[Any]) -> None:
        """On other ranks: set the gradient."""
        grad: Tensor | None = message[0]
        for number, param in enumerate(self._distinct):
            param.grad = grad if grad is None or number == 0 else grad.clone()


def _accumulate(param: Tensor, grad: Tensor) -> None:
    """Add to a gradient as autograd does."""
    if param.grad is None:
        param.grad = grad
    else:
        with torch.no_grad():
            param.grad.add_(grad)


def settle_points(
    schedule: Schedule,
    edges: Sequence[tuple[int, int]],
    grad_edges: Sequence[tuple[int, int]],
    groups: Sequence[TiedGroup],
    rank: int,
) -> list[list[int]]:
    """Return when a rank can add up micro-batches without waiting for what may wait for it.

    All waits lead from earlier to later in one run of the schedule, so they cannot form a circle.

    Args:
        schedule: what is computed.
        edges: on which values go.
        grad_edges: on which gradients come back.
        groups: those that the rank adds up.
        rank: the rank.

    Returns:
        Per group and micro-batch the index of the rank's action to add up before; its number of actions: at the end.
    """
    table = make_table(schedule)
    where, _ = first_places(table, schedule.num_stages, schedule.num_microbatches)
    waits = join((own_waits(where), edge_waits(where, tuple(edges), tuple(grad_edges))))
    done = walk(table, waits, schedule.num_ranks, timed=True)
    assert done.start is not None  # the schedule was found valid
    assert done.end is not None
    starts = done.start[table.rank == rank]
    found = []
    for group in groups:
        ready = torch.zeros(schedule.num_microbatches, dtype=done.end.dtype)
        for stage, _ in group.members:
            rows = (table.stage == stage) & (table.kind != int(Kind.F))
            ready.scatter_reduce_(0, table.microbatch[rows], done.end[rows], "amax")
        # Micro-batches are added in their order, so each waits for those before it.
        ready = ready.cummax(0).values
        found.append(torch.searchsorted(starts, ready).tolist())
    return found


def tied_groups(graph: GraphLike, placement: Sequence[int]) -> list[TiedGroup]:
    """Return the parameters that more than one stage has.

    Args:
        graph: the model in stages.
        placement: rank of each stage.
    """
    groups: list[TiedGroup] = []
    for group in graph.tied:
        names: dict[int, str] = {}
        for stage, name in group:
            names.setdefault(stage, name)
        if len(names) > 1:
            members = tuple(sorted(names.items(), reverse=True))
            groups.append(TiedGroup(len(groups), members, tuple(placement[stage] for stage, _ in members)))
    return groups
