"""The candidates among which `optimize` chooses: by name, by family, and by list scheduling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._schedule import Schedule
from .._simulate import Costs
from ..errors import ScheduleError
from ._columns import loop, vee
from ._family import family
from ._listing import Policy, Task, list_schedule, orders_of
from ._refine import renamed
from ._scale import make_task

__all__ = ["Member", "families", "fingerprint", "least_memory", "lists", "lower_bound", "named", "refilled"]

SLOPES = (1.0, 1.25, 1.5, 2.0)
"""Forwards in advance, per rank that follows."""
DELAYS = (None, 0.0, 0.5, 1.0, 1.5, 2.0)
"""Waits of weight gradients, per rank before; None: whole backwards."""
EXTRA = (0, 1, 2)
"""Forwards in advance of all ranks."""
PATIENCE = (0.0, 0.5, 1.0)
"""How much of the time of a weight gradient a rank rather waits for something more urgent."""


def named(num_ranks: int, num_microbatches: int, chunks: int, costs: Costs, memory: float | None) -> Iterator[Schedule]:
    """Yield all schedules that have a name, ours and those of plugins, as far as they come with so many chunks."""
    from .registry import BUILT_IN, TWO_CHUNKS, build_schedule, builders, takes

    for name, build in builders().items():
        known = takes(build)
        if name == "optimized" or (chunks != 1 and "chunks" not in known) or (name in TWO_CHUNKS and chunks != 2):
            continue
        try:
            schedule = build_schedule(
                name,
                num_ranks,
                num_microbatches,
                chunks=chunks,
                costs=costs if "costs" in known else None,
                memory=memory if "memory" in known else None,
            )
        except ScheduleError:
            if name in BUILT_IN:
                raise
            # That of a plugin may exist for some numbers only.
            continue
        yield schedule


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the family around 1F1B and ZB-H1, for any size."""

    slope: float
    """As in `family`."""
    delay: float | None
    """As in `family`."""
    extra: int
    """As in `family`."""

    def __call__(self, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
        """Return the schedule."""
        name = f"family({self.slope:g}, {'-' if self.delay is None else format(self.delay, 'g')}, {self.extra})"
        return family(name, num_ranks, num_microbatches, chunks, self.slope, self.delay, self.extra)


def families() -> Iterator[Member]:
    """Yield members of the family, named or not."""
    for slope, delay, extra in itertools.product(SLOPES, DELAYS, EXTRA):
        yield Member(slope, delay, extra)


def refilled(schedule: Schedule, costs: Costs, memory: float | None) -> Iterator[Schedule]:
    """Yield a schedule with its weight gradients placed anew, and some backwards whole; all else keeps its order."""
    task = make_task(schedule.placement, schedule.num_microbatches, costs)
    cap = [math.inf if memory is None else memory] * schedule.num_ranks
    for whole in _wholes(schedule, task):
        orders = orders_of(schedule, whole)
        for patience in PATIENCE:
            found = list_schedule(
                renamed(schedule.name, "refilled"), task, Policy(cap, patience=patience, orders=orders)
            )
            if found is not None:
                yield found


def _wholes(schedule: Schedule, task: Task) -> list[int]:
    """Return of how many first micro-batches backwards may stay whole: where that is cheaper, all but the last ones."""
    _, whole, inputs, weights = task.seconds
    if all(b >= i + w for b, i, w in zip(whole, inputs, weights, strict=True)):
        return [0]
    ranks, count = schedule.num_ranks, schedule.num_microbatches
    return sorted({max(0, count - last) for last in (count, 2 * ranks, ranks, ranks // 2, 1)})


def lists(
    num_ranks: int, num_microbatches: int, chunks: int, costs: Costs, memory: float | None
) -> Iterator[tuple[Task, Policy]]:
    """Yield what to give to `list_schedule`: all policies on all placements with so many chunks."""
    most = math.inf if memory is None else memory
    for placement in _placements(num_ranks, chunks):
        task = make_task(placement, num_microbatches, costs)
        one = _one_microbatch(task)
        # Memory for so many micro-batches on each rank; less than allowed may be faster: forwards do not push in.
        levels = {num_ranks // 2 + 1, num_ranks, num_ranks + 1, 2 * num_ranks, num_microbatches}
        caps = [tuple(min(most, level * size) for size in one) for level in sorted(levels)]
        falling = tuple(min(most, (num_ranks - rank) * size) for rank, size in enumerate(one))
        # All that is allowed comes first: it gets through whenever something does, and is never left out.
        for cap in dict.fromkeys([(most,) * num_ranks, *caps, falling]):
            for split in (True, False):
                for backward_first in (True, False):
                    for deep_first in (True, False) if chunks > 1 else (True,):
                        for patience in PATIENCE if split else (0.0,):
                            yield task, Policy(cap, split, backward_first, deep_first, patience)


def least_memory(num_ranks: int, chunks: int, costs: Costs) -> float:
    """Return what a rank must be able to keep at least: one micro-batch of all its stages, on the best placement.

    Args:
        num_ranks: ranks.
        chunks: stages a rank.
        costs: of the stages.
    """
    tasks = [make_task(placement, 1, costs) for placement in _placements(num_ranks, chunks)]
    return min(max(_one_microbatch(task)) for task in tasks)


def lower_bound(num_ranks: int, num_microbatches: int, chunks: int, costs: Costs) -> float:
    """Return seconds that every schedule on these placements takes: a rank starts when the first forward reaches it.

    Args:
        num_ranks: ranks.
        num_microbatches: micro-batches.
        chunks: stages a rank.
        costs: of the stages.
    """
    if costs.overlap > 0:
        return 0.0
    bounds = []
    for placement in _placements(num_ranks, chunks):
        task = make_task(placement, num_microbatches, costs)
        forward, whole, inputs, weights = task.seconds
        work = [0.0] * num_ranks
        for stage, rank in enumerate(placement):
            work[rank] += forward[stage] + min(whole[stage], inputs[stage] + weights[stage])
        reached = itertools.accumulate((f + hop for f, hop in zip(forward, task.hop, strict=True)), initial=0.0)
        # In both placements rank r takes stage r first.
        heads = itertools.islice(reached, num_ranks)
        bounds.append(max(head + num_microbatches * some for head, some in zip(heads, work, strict=True)))
    return min(bounds)


def fingerprint(schedule: Schedule) -> int:
    """Return a number that is the same for equal schedules of a size, and hardly ever for others."""
    mixed = [*schedule.placement]
    for rows in schedule.columns:
        code = (rows.stage.long() * schedule.num_microbatches + rows.microbatch) * 8 + rows.kind * 2 + rows.joined
        # Multiply, shift, multiply: the sum then depends on what stands where.
        code = (code + 1) * 0x9E3779B97F4A7C1 + torch.arange(len(rows)) * 0x2545F4914F6CDD1D
        mixed.append(int(((code ^ (code >> 29)) * 0x369DEA0F31A53F85).sum()))
    return hash(tuple(mixed))


def _one_microbatch(task: Task) -> list[float]:
    """Return what each rank keeps of one micro-batch between the forwards and the backwards of its stages."""
    one = [0.0] * task.num_ranks
    for stage, rank in enumerate(task.placement):
        one[rank] += task.kept[stage]
    return one


def _placements(num_ranks: int, chunks: int) -> list[tuple[int, ...]]:
    return [loop(num_ranks, chunks), *([vee(num_ranks)] if chunks == 2 and num_ranks > 1 else [])]
