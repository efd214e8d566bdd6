"""Clocks made to agree with what was sent: no message is here before it left.

Each pair of ranks with messages gives a difference constraint, x[a] - x[b] <= the least time from a send on a to its
arrival on b, where x is what is added to a rank's times; the bounds of the clock readings give more of them. The
shortest paths from and to the first rank are the largest and the smallest solution, and the mean of two solutions is
one too (Cormen et al., Introduction to Algorithms, chapter on difference constraints). Where no constant shift will
do, for clocks may drift, times of a rank are put off from the first message on that would arrive too early (as in
Lamport's logical clocks, 1978).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Delays", "Transfer", "constant_shifts", "delays", "shifts"]


class Transfer(NamedTuple):
    """A message, by times of its two ends."""

    src: int
    """Rank that sent it."""
    sent: int
    """Nanoseconds, when its send began."""
    dst: int
    """Rank that got it."""
    received: int
    """Nanoseconds, when it was there."""


def constant_shifts(
    ranks: Sequence[int], transfers: Sequence[Transfer], bounds: Mapping[int, int]
) -> dict[int, int] | None:
    """Return what to add to the times of each rank so that no message arrives before it leaves.

    Args:
        ranks: all ranks; nothing is added to the first one's times.
        transfers: all messages.
        bounds: nanoseconds per rank by which its times may be wrong. They are doubled as long as there is no solution.

    Returns:
        Nanoseconds per rank, in the middle of what is possible; None if no constants will do.
    """
    slack: dict[tuple[int, int], int] = {}
    for one in transfers:
        if one.src != one.dst:
            pair = one.src, one.dst
            slack[pair] = min(one.received - one.sent, slack.get(pair, one.received - one.sent))
    if not slack:
        return dict.fromkeys(ranks, 0)
    root = ranks[0]
    if _distances(ranks, [(dst, src, least) for (src, dst), least in slack.items()]) is None:
        return None
    wider = 1
    while True:
        edges = [(dst, src, least) for (src, dst), least in slack.items()]
        for rank in ranks:
            if rank != root:
                limit = max(1, bounds[rank]) * wider
                edges += [(root, rank, limit), (rank, root, limit)]
        high = _distances(ranks, edges, root)
        if high is not None:
            low = _distances(ranks, [(b, a, weight) for a, b, weight in edges], root)
            assert low is not None  # a circle is one in both directions
            # Rounding down keeps differences within whole numbers.
            return {rank: (high[rank] - low[rank]) // 2 for rank in ranks}
        wider *= 2


def _distances(
    ranks: Sequence[int], edges: Sequence[tuple[int, int, int]], root: int | None = None
) -> dict[int, int] | None:
    """Return the lengths of the shortest paths from `root`, or from anywhere; None if a circle is negative."""
    after: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    for a, b, weight in edges:
        after[a].append((b, weight))
    far: dict[int, int] = dict.fromkeys(ranks, 0) if root is None else {root: 0}
    hops = dict.fromkeys(ranks, 0)
    todo = deque(far)
    waiting = set(far)
    while todo:
        a = todo.popleft()
        waiting.discard(a)
        for b, weight in after[a]:
            length = far[a] + weight
            if b not in far or length < far[b]:
                far[b] = length
                hops[b] = hops[a] + 1
                if hops[b] >= len(ranks) or b == root:
                    return None
                if b not in waiting:
                    waiting.add(b)
                    todo.append(b)
    return far


class Delays:
    """What is added to the times of one rank, more from certain times on.

    Args:
        rows: (time from which on, nanoseconds that are added in all), in order.
    """

    def __init__(self, rows: Sequence[tuple[int, int]] = ()) -> None:
        self._times = [time for time, _ in rows]
        self._delays = [delay for _, delay in rows]

    def __call__(self, time: int) -> int:
        """Return a time, put off."""
        place = bisect_right(self._times, time)
        return time + self._delays[place - 1] if place else time

    @property
    def largest(self) -> int:
        """Nanoseconds that are added to the last times."""
        return self._delays[-1] if self._delays else 0


def delays(ranks: Sequence[int], transfers: Sequence[Transfer]) -> dict[int, Delays]:
    """Return how times are put off so that no message arrives before it leaves; the order on each rank stays.

    Args:
        ranks: all ranks.
        transfers: all messages.

    Raises:
        ValueError: messages of different ranks wait for each other in a circle, which no clocks explain.
    """
    events: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in ranks}
    for number, one in enumerate(transfers):
        if one.src != one.dst:
            events[one.src].append((one.sent, 1, number))
            events[one.dst].append((one.received, 0, number))
    left: dict[int, int] = {}
    at = dict.fromkeys(ranks, 0)
    rows: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    for some in events.values():
        some.sort()  # of one time, arrivals come first: they move the sends with them
    todo = deque(ranks)
    awaited: dict[int, int] = {}
    while todo:
        rank = todo.popleft()
        some, own = events[rank], rows[rank]
        while at[rank] < len(some):
            time, is_send, number = some[at[rank]]
            delay = own[-1][1] if own else 0
            if is_send:
                left[number] = time + delay
                if number in awaited:
                    todo.append(awaited.pop(number))
            elif number not in left:
                awaited[number] = rank
                break
            elif left[number] > time + delay:
                own.append((time, left[number] - time))
            at[rank] += 1
    if awaited:
        stuck = ", ".join(f"rank {rank} for rank {transfers[number].src}" for number, rank in awaited.items())
        raise ValueError(
            f"messages wait for each other in a circle ({stuck}); are these files of one run, with unique keys?"
        )
    return {rank: Delays(some) for rank, some in rows.items()}


def shifts(
    ranks: Sequence[int], transfers: Sequence[Transfer], bounds: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, Delays]]:
    """Return what is added to the times of each rank: a constant, and after it what `delays` says.

    Arguments and errors as in `constant_shifts` and `delays`.
    """
    constant = constant_shifts(ranks, transfers, bounds)
    if constant is not None:
        return constant, {rank: Delays() for rank in ranks}
    return dict.fromkeys(ranks, 0), delays(ranks, transfers)
