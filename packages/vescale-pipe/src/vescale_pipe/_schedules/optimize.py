"""Search for the schedule that is fastest for given costs and memory, by simulating many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .._schedule import Schedule
from .._simulate import Costs, simulate
from ..errors import ScheduleError
from ._listing import list_schedule
from ._refine import merged, neighbours, paired
from ._scale import costs_per_stage
from ._search import families, fingerprint, least_memory, lists, lower_bound, named, refilled

__all__ = ["costs_per_stage", "optimize", "optimized"]

T = TypeVar("T")
Key = tuple[float, float, int]
"""Makespan, most memory of a rank, number of actions: earlier ones decide."""

EFFORT = 2_000_000
"""Actions of a first, short look at candidates, for each number of chunks; beyond it fewer candidates are looked at."""
SHORT = 3
"""Micro-batches per rank of that look."""
KEPT = 8
"""Candidates that are looked at in full after it."""
JOINED = 4
"""How many times as many are tried with joined neighbours, where overlap is possible."""
STARTS = 3
"""Small schedules that are changed step by step."""
CHANGES = 2_000
"""Single changes that are tried on each, at most."""
SMALL = 200
"""Actions of a small schedule."""
EQUAL = 1e-9
"""Makespans that differ by less than this share are the same."""


def optimize(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    chunks: int | Sequence[int] = (1, 2),
    memory: float | None = None,
) -> Schedule:
    """Search a schedule that is fast for given costs and fits in memory.

    It simulates every schedule that has a name, ours and those of plugins, members of the (forwards in advance, wait
    of weight gradients) family between them, and list schedules with look-ahead; in the best, weight gradients are
    placed anew, and neighbours joined, merged, split or swapped. So no schedule with a name that fits is
    faster, by simulation; and none at all may be much faster, but that is not proved. It takes seconds for tens of
    ranks, and looks at fewer candidates beyond. The result is the same on every rank and in every run.

    Args:
        costs: as in `costs_per_stage`: numbers are for all layers of a rank, sequences for pieces of the model in a
            row, their length a multiple of num_ranks * chunks. Chunks that do not divide it are left out.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        chunks: how many stages a rank may have: numbers to try, or the only one.
        memory: bytes that a rank may keep for its backwards, in the unit of `costs.activation`; None: any.

    Returns:
        The schedule with the smallest makespan; of equal ones the one with least memory. Its `num_stages` says which
        of the chunks was best. Gradients of each stage accumulate in the order of the micro-batches, unless it is a
        plugin's.

    Raises:
        ScheduleError: one micro-batch alone does not fit in that memory, no chunks divide the pieces of `costs`, or an
            argument makes no sense.

    Example:
        >>> from vescale_pipe import Costs, costs_per_stage, simulate
        >>> found = optimize(Costs(forward=[1.0, 2.0]), 2, 3, chunks=[1])
        >>> simulate(found, costs_per_stage(Costs(forward=[1.0, 2.0]), 2, 1)).makespan
        19.0
    """
    some = _checked(costs, num_ranks, num_microbatches, chunks, memory)
    searches, refused = [], []
    for count in some:
        try:
            scaled = costs_per_stage(costs, num_ranks, count)
        except ScheduleError as error:
            refused.append(str(error))
            continue
        searches.append(_Search(num_ranks, num_microbatches, count, scaled, memory))
        searches[-1].run()
    if not searches:
        raise ScheduleError("optimize: no number of chunks is possible. " + " ".join(refused))
    found = [search for search in searches if search.best is not None]
    if not found:
        needed = min(search.needed for search in searches)
        raise ScheduleError(
            f"optimize: memory = {memory:g}, but one micro-batch alone keeps {needed:g} on some rank, with any of "
            f"{[search.chunks for search in searches]} chunks. Give more memory, lower activation by checkpointing, or "
            f"take smaller micro-batches."
        )
    best = found[0]
    for other in found[1:]:
        if _better(other.key, best.key):
            best = other
    assert best.best is not None
    return best.best


def _checked(costs: Any, num_ranks: Any, num_microbatches: Any, chunks: Any, memory: Any) -> tuple[int, ...]:
    """Return the numbers of chunks to try; refuse arguments that make no sense."""
    order = "the order is optimize(costs, num_ranks, num_microbatches)"
    if not isinstance(costs, Costs):
        raise ScheduleError(f"optimize: costs must be a Costs, and {costs!r:.100} was given; {order}.")
    for name, number in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"optimize: {name} = {number!r:.100}; it must be a whole number from 1 ({order}).")
    some = chunks if isinstance(chunks, Sequence) and not isinstance(chunks, str) else (chunks,)
    if not some or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in some):
        raise ScheduleError(f"optimize: chunks = {chunks!r:.100}; it must be a whole number from 1, or some of them.")
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        raise ScheduleError(f"optimize: memory = {memory!r:.100}; it must be a number above 0, or None for any.")
    return tuple(dict.fromkeys(some))


def optimized(
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """Build the schedule named "optimized": that of `optimize` for given costs, or for the default ones.

    Args:
        num_ranks: as in `optimize`.
        num_microbatches: as in `optimize`.
        chunks: the only number of chunks to try; None: 1 and 2.
        costs: as in `optimize`.
        memory: as in `optimize`.
    """
    some = (1, 2) if chunks is None else (chunks,)
    return optimize(Costs() if costs is None else costs, num_ranks, num_microbatches, chunks=some, memory=memory)


def _better(one: Key, other: Key) -> bool:
    """Tell whether a schedule is better than another, by its key; rounding does not decide."""
    if abs(one[0] - other[0]) > EQUAL * other[0]:
        return one[0] < other[0]
    return one[1:] < other[1:]


class _Search:
    """The search with one number of chunks."""

    def __init__(self, num_ranks: int, num_microbatches: int, chunks: int, costs: Costs, memory: float | None) -> None:
        self.num_ranks, self.num_microbatches, self.chunks = num_ranks, num_microbatches, chunks
        self.costs, self.memory = costs, memory
        self.best: Schedule | None = None
        self.key: Key = (math.inf, math.inf, 0)
        self.seen: list[tuple[Key, int, Schedule]] = []
        self.known: set[int] = set()
        self.room = JOINED * KEPT if costs.overlap > 0 else KEPT
        self.bound = lower_bound(num_ranks, num_microbatches, chunks, costs)
        self.needed = least_memory(num_ranks, chunks, costs)

    def run(self) -> None:
        """Offer all candidates, then what comes of the best."""
        for schedule in named(self.num_ranks, self.num_microbatches, self.chunks, self.costs, self.memory):
            self.offer(schedule)
        for source in (self.from_families, self.from_lists):
            if not self.reached():
                for schedule in source():
                    self.offer(schedule)
        for _, schedule in self.fastest()[:KEPT]:
            if not self.reached():
                for other in (schedule, *refilled(schedule, self.costs, self.memory)):
                    self.offer(other)
                    self.offer(merged(other))
        if self.costs.overlap > 0:
            # Joined neighbours need slack, which is not where plain schedules are best.
            for _, schedule in self.fastest():
                if not any(rows.joined.any() for rows in schedule.columns):
                    self.offer(paired(schedule, True))
                    self.offer(paired(schedule, False))
        for key, schedule in self.fastest(fitting=True)[:STARTS]:
            self.climb(key, schedule)

    def reached(self) -> bool:
        """Tell whether nothing can be faster than what was found."""
        return self.key[0] <= self.bound * (1 + EQUAL)

    def offer(self, schedule: Schedule) -> Key | None:
        """Take a schedule if it fits and is better; return its key if it fits and was not offered before."""
        digest = fingerprint(schedule)
        if digest in self.known:
            return None
        self.known.add(digest)
        try:
            found = simulate(schedule, self.costs)
        except ScheduleError:
            # Joining and changing do not look ahead: ranks may then wait for each other for ever.
            return None
        key = (found.makespan, max(found.peak, default=0.0), schedule.num_actions)
        self.keep(key, schedule)
        if not self.fits(key[1]):
            return None
        if _better(key, self.key):
            self.key, self.best = key, schedule
        return key

    def keep(self, key: Key, schedule: Schedule) -> None:
        """Remember a schedule among the fastest, and the fastest that fit; the others are too large to keep."""
        self.seen = sorted([*self.seen, (key, len(self.known), schedule)], key=lambda one: one[:2])
        fitting = [one for one in self.seen if self.fits(one[0][1])][: self.room]
        numbers = {number for _, number, _ in (*self.seen[: self.room], *fitting)}
        self.seen = [one for one in self.seen if one[1] in numbers]

    def fastest(self, fitting: bool = False) -> list[tuple[Key, Schedule]]:
        """Return what is kept of what was seen, fastest first; with `fitting` only what fits."""
        return [(key, schedule) for key, _, schedule in self.seen if not fitting or self.fits(key[1])][: self.room]

    def sampled(self, candidates: Iterable[T]) -> tuple[list[T], int]:
        """Return what to look at in a short step, and the micro-batches of that."""
        short = min(self.num_microbatches, SHORT * self.num_ranks)
        every = list(candidates)
        actions = 3 * self.num_ranks * self.chunks * short * len(every)
        return every[:: max(1, math.ceil(actions / EFFORT))], short

    def from_families(self) -> list[Schedule]:
        """Return the members of the family that are best in a short step."""
        members, short = self.sampled(families())
        timed = []
        seen: set[int] = set()
        for number, member in enumerate(members):
            schedule = member(self.num_ranks, short, self.chunks)
            digest = fingerprint(schedule)
            if digest in seen:
                continue
            seen.add(digest)
            found = simulate(schedule, self.costs)
            timed.append((not self.fits(max(found.peak)), found.makespan, number))
        return [members[at](self.num_ranks, self.num_microbatches, self.chunks) for _, _, at in sorted(timed)[:KEPT]]

    def from_lists(self) -> list[Schedule]:
        """Return the list schedules that are best in a short step."""
        short = min(self.num_microbatches, SHORT * self.num_ranks)
        policies, short = self.sampled(lists(self.num_ranks, short, self.chunks, self.costs, self.memory))
        timed = []
        seen: set[int] = set()
        for number, (task, policy) in enumerate(policies):
            listed = list_schedule("list", task, policy)
            digest = 0 if listed is None else fingerprint(listed)
            if listed is not None and digest not in seen:
                seen.add(digest)
                timed.append((simulate(listed, self.costs).makespan, number))
        found = []
        for _, number in sorted(timed)[:KEPT]:
            task, policy = policies[number]
            listed = list_schedule("list", replace(task, num_microbatches=self.num_microbatches), policy)
            if listed is not None:
                found.append(listed)
        return found

    def fits(self, peak: float) -> bool:
        """Tell whether a rank may keep so much."""
        return self.memory is None or peak <= self.memory * (1 + EQUAL)

    def climb(self, key: Key, schedule: Schedule) -> None:
        """Change a small schedule in one place, as long as that makes it faster."""
        trials = CHANGES
        better = schedule.num_actions <= SMALL
        while better and trials > 0 and not self.reached():
            better = False
            for other in neighbours(schedule):
                trials -= 1
                found = self.offer(other)
                if found is not None and found[0] < key[0] * (1 - EQUAL):
                    key, schedule, better = found, other, True
                    break
