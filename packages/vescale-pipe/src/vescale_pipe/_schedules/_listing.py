"""List scheduling: whenever a rank is free it takes the best action that is ready, as long as its memory lasts.

The orders that come out are those of a simulation, so they are always possible; a cap that no order keeps gives None.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .._schedule import Columns, Kind, Schedule

__all__ = ["Order", "Policy", "Task", "list_schedule", "orders_of"]

Order = list[tuple[Kind, int, int]]
"""(kind, stage, micro-batch) in the order of one rank."""
EPSILON = 1e-9
"""Times that differ by this share of the shortest action are the same: sums of seconds are rounded."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be scheduled, and what it costs, as plain numbers."""

    placement: tuple[int, ...]
    """Rank of each stage."""
    num_microbatches: int
    """Micro-batches."""
    seconds: tuple[tuple[float, ...], ...]
    """Seconds of each kind (row, as `Kind` counts) for each stage (column), on the rank that holds it."""
    hop: tuple[float, ...]
    """Seconds from the end of stage s until stage s+1 has its output, and the same back for the gradient."""
    kept: tuple[float, ...]
    """Memory that each stage keeps from F to B or I."""
    later: tuple[float, ...]
    """Memory that each stage keeps from I to W."""

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return max(self.placement) + 1


@dataclass(frozen=True, slots=True)
class Policy:
    """Which of the actions that are ready a rank takes."""

    cap: Sequence[float]
    """Memory of each rank."""
    split: bool = True
    """Whether backwards are split in I and W."""
    backward_first: bool = True
    """Whether a backward goes before a forward if both are ready."""
    deep_first: bool = True
    """Whether of several forwards that of the latest stage goes first; of backwards, that of the earliest."""
    patience: float = 0.0
    """A rank rather waits than takes a W, if something else is ready within this share of the W's seconds."""
    orders: Sequence[Order] | None = None
    """Per rank the order of its F, B and I; only the W are placed freely. None: all are."""


@dataclass(slots=True)
class _Rank:
    """What a rank has done so far."""

    number: int
    """Number of the rank."""
    stages: list[int]
    """Stages of the rank."""
    cap: float
    """Memory."""
    free_at: float = 0.0
    """When its last action ends."""
    live: float = 0.0
    """Memory in use after that."""
    waits: bool = False
    """Whether it found nothing to do when it was looked at last."""
    order: Order = field(default_factory=list)
    """What it has done."""
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    """(stage, micro-batch) of the W that may run."""
    place: int = 0
    """Where it is in the order that the policy gives."""


def list_schedule(name: str, task: Task, policy: Policy) -> Schedule | None:
    """Return the schedule that a policy gives, or None if it does not get through with that memory.

    Each stage takes its micro-batches in order, for F, I and W alike.

    Args:
        name: of the schedule.
        task: what to schedule.
        policy: how.
    """
    run = _Run(task, policy)
    if not run.finish():
        return None
    columns = tuple(_columns(rank.order) for rank in run.ranks)
    return Schedule(name, task.placement, task.num_microbatches, columns)


def orders_of(schedule: Schedule, whole: int = 0) -> list[Order]:
    """Return the order of the forwards and backwards of each rank, without that of W.

    Args:
        schedule: any.
        whole: backwards of micro-batches below this are B, of the others I.
    """
    orders: list[Order] = []
    for rank in range(schedule.num_ranks):
        rows: Order = []
        for kind, stage, microbatch in schedule.actions(rank):
            back = Kind.B if microbatch < whole else Kind.I
            if kind is not Kind.W:
                rows.append((Kind.F if kind is Kind.F else back, stage, microbatch))
        orders.append(rows)
    return orders


def _columns(order: Order) -> Columns:
    rows = torch.tensor(order, dtype=torch.int32).reshape(-1, 3)
    kind, stage, microbatch = rows.t().contiguous()
    return Columns(kind.to(torch.uint8), stage, microbatch, torch.zeros(len(order), dtype=torch.bool))


class _Run:
    """One pass in the order of time."""

    def __init__(self, task: Task, policy: Policy) -> None:
        self.task, self.policy = task, policy
        count = len(task.placement)
        self.back = Kind.I if policy.split else Kind.B
        self.forwards, self.backwards = [0] * count, [0] * count
        # Seconds at which the input, or the gradient of the output, of each micro-batch is at the stage.
        self.inputs: list[list[float]] = [[] for _ in range(count)]
        self.inputs[0] = [0.0] * task.num_microbatches
        self.grads: list[list[float]] = [[] for _ in range(count)]
        self.ranks = [_Rank(rank, [], policy.cap[rank]) for rank in range(task.num_ranks)]
        for stage, rank in enumerate(task.placement):
            self.ranks[rank].stages.append(stage)
        self.reserve = [
            sum(task.kept[other] for other in self.ranks[rank].stages if other > stage)
            for stage, rank in enumerate(task.placement)
        ]
        positive = [second for row in task.seconds for second in row if second > 0]
        self.epsilon = EPSILON * min(positive, default=1.0)
        self.heap = [(0.0, rank) for rank in range(task.num_ranks)]

    def finish(self) -> bool:
        """Run to the end; False if ranks wait for ever."""
        while self.heap:
            now, number = heapq.heappop(self.heap)
            rank = self.ranks[number]
            if now < rank.free_at - self.epsilon:
                continue
            now = max(now, rank.free_at)
            best, soonest = self.choose(rank, now)
            rank.waits = best is None
            wake = soonest if best is None else self.do(rank, *best, now)
            if wake is not None:
                heapq.heappush(self.heap, (wake, number))
        done = self.task.num_microbatches
        return all(count == done for count in self.backwards) and not any(rank.weights for rank in self.ranks)

    def choose(self, rank: _Rank, now: float) -> tuple[tuple[Kind, int] | None, float | None]:
        """Return what a rank should do now, or else when something becomes ready; None: not known yet."""
        best: tuple[Kind, int] | None = None
        soonest: float | None = None
        for kind, stage in self.candidates(rank):
            ready = self.ready(kind, stage)
            if ready is None:
                continue
            if ready <= now + self.epsilon:
                best = (kind, stage)
                break
            soonest = ready if soonest is None else min(soonest, ready)
        if best is None and rank.weights:
            stage = rank.weights[0][0]
            if (
                soonest is None
                or soonest - now >= self.policy.patience * self.task.seconds[Kind.W][stage] - self.epsilon
            ):
                best = (Kind.W, stage)
        return best, soonest

    def candidates(self, rank: _Rank) -> list[tuple[Kind, int]]:
        """Return what a rank may do apart from W, best first, as far as its memory allows."""
        total = self.task.num_microbatches
        if self.policy.orders is not None:
            order = self.policy.orders[rank.number]
            if rank.place == len(order):
                return []
            kind, stage, _ = order[rank.place]
            fits = kind is not Kind.F or rank.live + self.task.kept[stage] <= rank.cap * (1 + EPSILON)
            return [(kind, stage)] if fits else []
        backwards = [(self.back, s) for s in rank.stages if self.backwards[s] < self.forwards[s]]
        forwards = [
            (Kind.F, s)
            for s in reversed(rank.stages)
            if self.forwards[s] < total and rank.live + self.task.kept[s] + self.reserve[s] <= rank.cap * (1 + EPSILON)
        ]
        if not self.policy.deep_first:
            backwards.reverse()
            forwards.reverse()
        return backwards + forwards if self.policy.backward_first else forwards + backwards

    def ready(self, kind: Kind, stage: int) -> float | None:
        """Return when the next action of a kind and stage has all it needs; None: not known yet."""
        if kind is Kind.F:
            known, at = self.inputs[stage], self.forwards[stage]
        else:
            known, at = self.grads[stage], self.backwards[stage]
        return known[at] if at < len(known) else None

    def do(self, rank: _Rank, kind: Kind, stage: int, now: float) -> float:
        """Do an action, tell those who wait for it, and return when the rank is free again."""
        task = self.task
        end = now + task.seconds[kind][stage]
        last = stage == len(task.placement) - 1
        if kind is Kind.W:
            _, microbatch = rank.weights.popleft()
            rank.live -= task.later[stage]
        elif kind is Kind.F:
            microbatch = self.forwards[stage]
            self.forwards[stage] += 1
            rank.live += task.kept[stage]
            if last:
                self.grads[stage].append(end)
            else:
                self.send(self.inputs[stage + 1], end + task.hop[stage], task.placement[stage + 1])
        else:
            microbatch = self.backwards[stage]
            self.backwards[stage] += 1
            rank.live -= task.kept[stage]
            if kind is Kind.I:
                rank.live += task.later[stage]
                rank.weights.append((stage, microbatch))
            if stage:
                self.send(self.grads[stage - 1], end + task.hop[stage - 1], task.placement[stage - 1])
        if kind is not Kind.W:
            rank.place += 1
        rank.order.append((kind, stage, microbatch))
        rank.free_at = end
        return end

    def send(self, box: list[float], arrives: float, to: int) -> None:
        """Note when something arrives, and wake its rank for it."""
        box.append(arrives)
        rank = self.ranks[to]
        if rank.waits:
            heapq.heappush(self.heap, (max(arrives, rank.free_at), to))
