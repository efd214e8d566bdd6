"""What a simulation finds out: times, bubbles, memory, the critical path, and what would be if costs were others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._schedule import Action, Schedule
from . import memory, path
from .costs import NAMES, Costs
from .graph import Graph

__all__ = ["Simulation"]

TIMES = {"forward", "backward", "input_grad", "weight_grad"}


@dataclass(frozen=True, eq=False)
class Simulation:
    """When each action of a schedule starts and ends if each does as early as it can, and what follows from that.

    Seconds count from the start of the step. Two bubbles are told, since papers and programs mean different ones: that
    of the whole step, and that of the ranks' own spans, which leaves out how much later one rank starts than another.
    """

    schedule: Schedule
    """What was simulated."""
    costs: Costs
    """What its actions cost."""
    edges: tuple[tuple[int, int], ...] | None
    """Which stage gives to which; None: each to the next."""
    start: tuple[Tensor, ...]
    """Per rank the start of each action in the order of the rank; float64 seconds."""
    end: tuple[Tensor, ...]
    """The same for the ends; both of a joined pair start and end together."""
    durations: tuple[Tensor, ...] | None = field(repr=False)
    """Per rank the seconds of each action that were given in place of those of `costs`."""
    graph: Graph = field(repr=False)
    """The schedule as tensors."""
    unit_start: Tensor = field(repr=False)
    """Start of each unit of the graph."""
    unit_end: Tensor = field(repr=False)
    """End of each unit of the graph."""

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.unit_end.max()) if self.unit_end.numel() else 0.0

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes; what is hidden by overlap in joined pairs counts once."""
        bounds = self.graph.first_unit.tolist()
        return tuple(float(self.graph.duration[a:b].sum()) for a, b in pairwise(bounds))

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Seconds from the first start to the last end of each rank."""
        return tuple(
            float(end[-1] - start[0]) if len(start) else 0.0 for start, end in zip(self.start, self.end, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Share of ranks x makespan in which ranks idle."""
        return self._idle_share(self.makespan)

    @property
    def own_bubble(self) -> float:
        """Share of ranks x longest own span in which ranks idle, as in the zero-bubble papers.

        What it leaves out is hidden only where no collective ends the step (see Qi et al., Zero Bubble Pipeline
        Parallelism, 2023, section 4).
        """
        return self._idle_share(max(self.spans, default=0.0))

    def _idle_share(self, span: float) -> float:
        return 1 - sum(self.busy) / (span * len(self.busy)) if span > 0 else 0.0

    @cached_property
    def peaks(self) -> tuple[memory.Peak, ...]:
        """Per rank the most that it keeps for its backwards, and the action at which it first does."""
        return memory.peaks(self.graph, self.costs)

    @property
    def peak(self) -> tuple[float, ...]:
        """Per rank the most that it keeps for its backwards: bytes, or activations where those cost 1."""
        return tuple(peak.amount for peak in self.peaks)

    def kept(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what a rank keeps over time.

        Args:
            rank: the rank.

        Returns:
            seconds: float64, (2 n,) for n actions, when one starts or ends.
            amount: float64, (2 n,), what is kept from then on.
        """
        amount, index, ends = memory.levels(self.graph, self.costs, rank)
        return torch.where(ends, self.end[rank][index], self.start[rank][index]), amount

    def critical_path(self) -> tuple[path.PathStep, ...]:
        """Return actions that one after another, with the messages between them, take the whole makespan.

        Each step is (rank, action, why it started when it did, delay, start, end); the delays and the lengths of the
        actions add up to the makespan. Where there are several such paths, one that stays on its rank is preferred.
        """
        return path.critical_path(self.graph, self.unit_start, self.unit_end)

    def what_if(self, *, faster: Mapping[int, float] | None = None, **changes: Any) -> Simulation:
        """Return the simulation of the same schedule under other costs.

        Args:
            faster: percent by which ranks are faster; {3: 10} makes rank 3 go at 1.1 times its speed.
            changes: fields of `Costs` with new values.

        Raises:
            ValueError: a name is no field of `Costs`, no rank, or a time of actions whose durations were given.

        Example:
            >>> from vescale_pipe import Action, Kind, Schedule, simulate
            >>> first, second = [Action(Kind.F, 0, 0)], [Action(Kind.F, 1, 0)]
            >>> now = simulate(Schedule.of("forward", [0, 1], 1, [first, second]))
            >>> now.makespan, now.what_if(faster={1: 100}).makespan, now.what_if(latency=0.5).makespan
            (2.0, 1.5, 2.5)
        """
        from .simulate import simulate

        unknown = changes.keys() - NAMES
        if unknown:
            raise ValueError(f"what_if: {sorted(unknown)} given; costs have {sorted(NAMES)}.")
        if self.durations is not None and changes.keys() & TIMES:
            raise ValueError(
                f"what_if: {sorted(changes.keys() & TIMES)} given, but the durations of actions are known."
            )
        costs = replace(self.costs, **changes)
        if faster:
            ranks = self.schedule.num_ranks
            if not all(0 <= rank < ranks for rank in faster):
                raise ValueError(f"what_if: faster={dict(faster)} given; ranks are 0 to {ranks - 1}.")
            speeds = costs.speeds(ranks).tolist()
            costs = replace(costs, rank_speed=[v * (1 + faster.get(r, 0) / 100) for r, v in enumerate(speeds)])
        return simulate(self.schedule, costs, self.edges, durations=self.durations)

    def gains(self, percent: float = 10.0, ranks: Sequence[int] | None = None) -> dict[int, float]:
        """Return how many seconds of makespan it saves to make a rank faster, for one rank at a time.

        Args:
            percent: by how much faster.
            ranks: those to try; None: all. Each takes a simulation.
        """
        some = range(self.schedule.num_ranks) if ranks is None else ranks
        return {rank: self.makespan - self.what_if(faster={rank: percent}).makespan for rank in some}

    def action_times(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of each action of a rank, in its order."""
        actions = self.schedule.actions(rank)
        return list(zip(actions, self.start[rank].tolist(), self.end[rank].tolist(), strict=True))

    def __str__(self) -> str:
        return (
            f"{self.schedule.name}: {self.schedule.num_ranks} ranks, {self.schedule.num_microbatches} micro-batches, "
            f"makespan {self.makespan:.6g}, bubble {self.bubble:.1%} (own span {self.own_bubble:.1%}), "
            f"peak {max(self.peak, default=0.0):.6g}"
        )
