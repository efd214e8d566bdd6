"""How far the clocks of other ranks are ahead, from messages to and fro (as in NTP, RFC 5905 section 8).

A ping leaves a rank at t0, reaches its parent at t1, is answered at t2, and the answer comes at t3. As no message
arrives before it is sent, the parent's clock is ahead by at least t2 - t3 and by at most t1 - t0. These bounds hold
for each ping, so the tightest of them hold together; their middle is the estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from .span import ClockReading

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PINGS", "estimate", "partners", "read_clocks"]

PINGS = 32
LONGEST = 1.5
"""Pings that take so many times as long as the fastest one are not looked at."""
TAG = 0x7C10C


def estimate(pings: Iterable[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Return how far the other clock is ahead, and by how much this may be wrong, in nanoseconds.

    Args:
        pings: (t0, t1, t2, t3) each, as above: t0 and t3 by the own clock, t1 and t2 by the other one.

    Raises:
        ValueError: there is none.

    Example:
        >>> estimate([(0, 105, 106, 11), (20, 123, 124, 30)])
        (99, 5)
    """
    some = list(pings)
    if not some:
        raise ValueError("pings: none given; the other clock was never read.")
    trips = [(t3 - t0) - (t2 - t1) for t0, t1, t2, t3 in some]
    fastest = min(trips)
    good = [ping for ping, trip in zip(some, trips, strict=True) if trip <= LONGEST * fastest]
    low = max(t2 - t3 for _, _, t2, t3 in good)
    high = min(t1 - t0 for t0, t1, _, _ in good)
    if low > high:  # a clock was set between two pings
        t0, t1, t2, t3 = some[trips.index(fastest)]
        low, high = t2 - t3, t1 - t0
    return (low + high) // 2, (high - low + 1) // 2 + 1


def partners(place: int, count: int) -> list[tuple[str, int]]:
    """Return whom a rank talks to, in order, as ("child" | "parent" - what it is itself, place of the other one).

    The ranks make a tree of log2(count) levels, in which pairs of one level talk at the same time.

    Args:
        place: of the rank.
        count: ranks.

    Example:
        >>> partners(0, 4), partners(3, 4)
        ([('parent', 1), ('parent', 2)], [('child', 2)])
    """
    found = []
    distance = 1
    while distance < count:
        if place % (2 * distance) == distance:
            found.append(("child", place - distance))
            break
        if place + distance < count:
            found.append(("parent", place + distance))
        distance *= 2
    return found


def read_clocks(group: ProcessGroup, ranks: Sequence[int], pings: int = PINGS) -> ClockReading | None:
    """Let ranks read each other's clocks; all of them call this at the same time.

    Args:
        group: that can send tensors of the CPU between them.
        ranks: in the group, in the same order everywhere; the first one's clock is the common one.
        pings: messages to and fro per pair.

    Returns:
        What this rank learned; None on the first one.

    Raises:
        ValueError: this rank is not among them, or `pings` is not positive.
    """
    if pings < 1:
        raise ValueError(f"pings: {pings} given; at least one is needed to read a clock.")
    me = group.rank()
    if me not in ranks:
        raise ValueError(f"rank {me} reads clocks of ranks {list(ranks)}, which it is not among.")
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    reading = None
    for role, place in partners(list(ranks).index(me), len(ranks)):
        peer = ranks[place]
        if role == "parent":
            for _ in range(pings):
                group.recv([one], peer, TAG).wait()
                arrived = perf_counter_ns()
                two[0] = arrived
                two[1] = perf_counter_ns()
                group.send([two], peer, TAG + 1).wait()
            continue
        found = []
        for _ in range(pings):
            sent = perf_counter_ns()
            group.send([one], peer, TAG).wait()
            group.recv([two], peer, TAG + 1).wait()
            came = perf_counter_ns()
            arrived, answered = two.tolist()
            found.append((sent, arrived, answered, came))
        offset, bound = estimate(found)
        reading = ClockReading((found[0][0] + found[-1][3]) // 2, peer, offset, bound)
    return reading
