"""Simulation one action at a time: each rank goes on as far as it can, then the next one does."""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Graph
from .stuck import stuck

__all__ = ["run"]


def run(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return when each unit starts and ends, each as early as it can.

    Args:
        graph: the schedule.

    Returns:
        start, end: float64, (U,), seconds from the start of the step.

    Raises:
        ScheduleError: ranks wait for each other for ever.
    """
    units, width = graph.source.shape
    duration: list[float] = graph.duration.tolist()
    source: list[list[int]] = graph.source.tolist()
    delay: list[list[float]] = graph.delay.tolist()
    position: list[int] = graph.first_unit[:-1].tolist()
    stop: list[int] = graph.first_unit[1:].tolist()
    clock = [0.0] * len(position)
    start, end = [0.0] * units, [-1.0] * units
    waiting: dict[int, list[int]] = {}
    links = _Links(graph) if graph.fifo else None
    work = list(range(len(position)))[::-1]
    while work:
        here = work.pop()
        unit, now = position[here], clock[here]
        while unit < stop[here]:
            begin = now
            for slot, giver in enumerate(source[unit]):
                if giver == units:
                    continue
                if end[giver] < 0:
                    waiting.setdefault(giver, []).append(here)
                    break
                arrival = end[giver] + delay[unit][slot] if links is None else links.arrival[unit * width + slot]
                begin = max(begin, arrival)
            else:
                now = begin + duration[unit]
                start[unit], end[unit] = begin, now
                if links is not None:
                    links.send(unit, now)
                work.extend(waiting.pop(unit, ()))
                unit += 1
                continue
            break
        position[here], clock[here] = unit, now
    if position != stop:
        raise stuck(graph, position)
    return torch.tensor(start, dtype=torch.float64), torch.tensor(end, dtype=torch.float64)


class _Links:
    """Links that carry one message at a time, in the order in which their sender gives them."""

    def __init__(self, graph: Graph) -> None:
        slots, link = graph.outgoing()
        self.none = graph.source.numel()
        self.slots: list[list[int]] = slots.tolist()
        self.link: list[int] = link.tolist()
        self.delay: list[float] = graph.delay.flatten().tolist()
        self.transfer: list[float] = graph.transfer.flatten().tolist()
        self.free = [0.0] * (max(self.link) + 1)
        self.arrival = [0.0] * self.none

    def send(self, unit: int, now: float) -> None:
        for slot in self.slots[unit]:
            if slot == self.none:
                break
            link = self.link[slot]
            leaves = max(now, self.free[link])
            self.free[link] = leaves + self.transfer[slot]
            self.arrival[slot] = leaves + self.delay[slot]
