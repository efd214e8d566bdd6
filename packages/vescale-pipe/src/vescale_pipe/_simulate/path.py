"""The critical path: the actions and messages that add up to the makespan."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._schedule import Action
from .graph import Graph

__all__ = ["PathStep", "critical_path"]


class PathStep(NamedTuple):
    """One action of a critical path."""

    rank: int
    """Rank that does it."""
    action: Action
    """What is done; of a joined pair, the one that is waited for."""
    why: Literal["first", "rank", "message", "queue"]
    """What let it start: nothing; the action before it on its rank; a message of the step before; a message that stood
    behind that of the step before on their link."""
    delay: float
    """Seconds from the end of the step before, which messages took."""
    start: float
    """Seconds from the start of the step to that of the action."""
    end: float
    """Seconds to its end."""


def critical_path(graph: Graph, start: Tensor, end: Tensor) -> tuple[PathStep, ...]:
    """Return a chain of actions that ends with the last one and in which each starts as soon as the one before lets it.

    Args:
        graph: the schedule.
        start: of each unit, float64, (U,).
        end: the same.
    """
    if not graph.rank.numel():
        return ()
    links = _Links(graph, end) if graph.fifo else None
    unit = int(end.argmax())
    action = int(graph.members[unit, 0])
    steps: list[PathStep] = []
    while True:
        begins = float(start[unit])
        before, giver, why = _before(graph, start, end, links, unit)
        finished = float(end[before]) if before >= 0 else 0.0
        steps.append(
            PathStep(int(graph.rank[unit]), graph.action(action), why, begins - finished, begins, float(end[unit]))
        )
        if before < 0:
            return tuple(reversed(steps))
        unit, action = before, giver


def _before(
    graph: Graph, start: Tensor, end: Tensor, links: _Links | None, unit: int
) -> tuple[int, int, Literal["first", "rank", "message", "queue"]]:
    """Return the unit that lets one start, the action of it that does, and how."""
    begins = float(start[unit])
    rank = int(graph.rank[unit])
    if unit > int(graph.first_unit[rank]) and float(end[unit - 1]) == begins:
        # Of a joined pair, the action that is longer is not known any more; name the first.
        return unit - 1, int(graph.members[unit - 1, 0]), "rank"
    none = len(graph.rank)
    for slot, source in enumerate(graph.source[unit].tolist()):
        if source == none or int(graph.rank[source]) == rank:
            continue  # what the rank made itself was there when the action before this one ended
        place = unit * graph.source.shape[1] + slot
        giver = int(graph.giver[unit, slot])
        arrival = float(end[source] + graph.delay[unit, slot]) if links is None else links.arrival(place)
        if arrival != begins:
            continue
        if links is None:
            return source, giver, "message"
        head = links.head(place)
        if head == place:
            return source, giver, "message"
        giver = int(graph.giver.flatten()[head])
        return int(graph.unit[giver]), giver, "queue"
    return -1, -1, "first"


class _Links:
    """When messages leave and arrive on links that carry one at a time; worked out for a link when asked for."""

    def __init__(self, graph: Graph, end: Tensor) -> None:
        slots, link = graph.outgoing()
        used = slots.flatten()  # rank after rank, in the order of sending
        used = used[used < graph.source.numel()]
        self._graph, self._end, self._link = graph, end, link
        lines = link[used]
        order = lines.argsort(stable=True)
        self._used, self._bounds = used[order], lines[order]
        self._known: dict[int, tuple[float, int]] = {}

    def arrival(self, place: int) -> float:
        """Return when a message arrives."""
        self._learn(place)
        return self._known[place][0] + float(self._graph.delay.flatten()[place])

    def head(self, place: int) -> int:
        """Return the message that left at once and behind which, without a gap, the given one left; maybe itself."""
        self._learn(place)
        return self._known[place][1]

    def _learn(self, place: int) -> None:
        if place in self._known:
            return
        link = self._link[place]
        first, stop = (int(torch.searchsorted(self._bounds, link, right=right)) for right in (False, True))
        slots = self._used[first:stop]
        ends = self._end[self._graph.source.flatten()[slots]].tolist()
        seconds = self._graph.transfer.flatten()[slots].tolist()
        free, head = 0.0, -1
        for slot, ready, transfer in zip(slots.tolist(), ends, seconds, strict=True):
            if head < 0 or ready >= free:
                head = slot
            leaves = max(ready, free)
            self._known[slot] = (leaves, head)
            free = leaves + transfer
