"""Simulation in waves: of all ranks, those whose next action can start do it together, as tensor operations.

The same numbers as one action at a time, to the last bit, for thousands of ranks in the time of one.
"""

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
    nan = float("nan")  # stands for "not known yet", and makes all that is computed from it not known either
    start = torch.full((units,), nan, dtype=torch.float64)
    end = torch.full((units + 1,), nan, dtype=torch.float64)
    end[units] = 0.0
    links = _Links(graph) if graph.fifo else None
    flat_source, flat_delay = graph.source.flatten(), graph.delay.flatten()
    stop = graph.first_unit[1:]
    alive = (graph.first_unit[:-1] < stop).nonzero().flatten()
    position, last = graph.first_unit[alive], stop[alive]
    clock = torch.zeros(len(alive), dtype=torch.float64)
    while alive.numel():
        if links is not None:
            begin = links.arrival[position].amax(1)
        elif width == 1:
            begin = end[flat_source[position]] + flat_delay[position]
        else:
            begin = (end[graph.source[position]] + graph.delay[position]).amax(1)
        begin = torch.maximum(begin, clock)
        ready = (begin == begin).nonzero().flatten()
        if not ready.numel():
            where = stop.tolist()
            for rank, unit in zip(alive.tolist(), position.tolist(), strict=True):
                where[rank] = unit
            raise stuck(graph, where)
        done, begin = position[ready], begin[ready]
        finish = begin + graph.duration[done]
        start[done] = begin
        end[done] = finish
        clock[ready] = finish
        if links is not None:
            links.send(done, finish)
        position[ready] = done + 1
        going = position < last
        if not bool(going.all()):
            alive, position, last, clock = alive[going], position[going], last[going], clock[going]
    return start, end[:units]


class _Links:
    """Links that carry one message at a time, in the order in which their sender gives them."""

    def __init__(self, graph: Graph) -> None:
        units, width = graph.source.shape
        self.slots, self.link = graph.outgoing()
        self.delay = torch.cat([graph.delay.flatten(), torch.zeros(1, dtype=torch.float64)])
        self.transfer = torch.cat([graph.transfer.flatten(), torch.zeros(1, dtype=torch.float64)])
        self.free = torch.zeros(int(self.link.max()) + 1, dtype=torch.float64)
        # One more place takes what is sent to nobody.
        self.flat = torch.full((units * width + 1,), float("nan"), dtype=torch.float64)
        self.flat[:-1][graph.source.flatten() == units] = 0.0
        self.arrival = self.flat[:-1].view(units, width)

    def send(self, units: Tensor, now: Tensor) -> None:
        for slots in self.slots[units].unbind(1):
            some = (slots < len(self.flat) - 1).nonzero().flatten()
            if not some.numel():
                break
            slots = slots[some]
            link = self.link[slots]
            # No two of these share a link: each is of another sender.
            leaves = torch.maximum(now[some], self.free[link])
            self.free[link] = leaves + self.transfer[slots]
            self.flat[slots] = leaves + self.delay[slots]
