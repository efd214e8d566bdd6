"""Times of one rank by the clock of another: from readings of its clock, with drift."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from .rank_file import RankSpans
from .span import ClockReading

__all__ = ["Chain", "ClockMap", "chains"]

STEEPEST = 1e-3
"""Faster than this no two clocks drift apart; readings that would say so are too near to each other to tell."""
UNREAD = 1_000_000
"""Nanoseconds by which clocks of different ranks are taken to differ that were never read, only by the time of day."""


class ClockMap:
    """Turns times of one clock into those of another, by a line through the readings.

    Between two readings it is wrong by no more than the worse one of them if the drift is constant; beyond them it
    goes on with the drift between the first and the last.

    Args:
        readings: of one pair of clocks, at least one.

    Example:
        >>> both = ClockMap([ClockReading(0, 0, 100, 2), ClockReading(1_000_000, 0, 200, 2)])
        >>> both(500_000), both.bound(500_000)
        (500150, 2)
    """

    def __init__(self, readings: Sequence[ClockReading]) -> None:
        kept: list[ClockReading] = []
        for one in sorted(readings, key=lambda one: one.time):
            if kept and one.time - kept[-1].time <= (one.bound + kept[-1].bound) / STEEPEST:
                kept[-1] = min(kept[-1], one, key=lambda one: one.bound)
            else:
                kept.append(one)
        self._readings = kept
        self._times = [one.time for one in kept]

    def __call__(self, time: int) -> int:
        """Return a time by the other clock, in nanoseconds."""
        some = self._readings
        first, last = some[0], some[-1]
        if len(some) > 1 and first.time <= time <= last.time:
            place = min(bisect_right(self._times, time), len(some) - 1)
            first, last = some[place - 1], some[place]
        start = last if time > last.time else first
        if first.time == last.time:
            return time + start.offset
        # In integers: clocks count 1e15 ns and more, where floats are not exact.
        return time + start.offset + (last.offset - first.offset) * (time - start.time) // (last.time - first.time)

    def bound(self, time: int) -> int:
        """Return by how many nanoseconds the time may be wrong at most, if the drift is constant."""
        first, last = self._readings[0], self._readings[-1]
        if first.time <= time <= last.time and len(self._readings) > 1:
            place = min(bisect_right(self._times, time), len(self._times) - 1)
            return max(self._readings[place - 1].bound, self._readings[place].bound)
        near, far = (first, time - first.time) if time < first.time else (last, time - last.time)
        if first.time == last.time:
            return near.bound
        return near.bound + (first.bound + last.bound) * abs(far) // (last.time - first.time)


class Chain:
    """Turns times of a rank into times of the first one, over the ranks between them.

    Args:
        origin: of the rank's times.
        maps: of its clock to the next one's, and so on.
        known: whether clocks were read; else by the time of day.
    """

    def __init__(self, origin: int, maps: Sequence[ClockMap], known: bool = True) -> None:
        self._origin = origin
        self._maps = tuple(maps)
        self.known = known
        """Whether clocks were read; else the ranks are put together by the time of day."""

    def __call__(self, time: int) -> int:
        """Return a time by the clock of the first rank, in nanoseconds."""
        time += self._origin
        for one in self._maps:
            time = one(time)
        return time

    def bound(self, time: int) -> int:
        """Return by how many nanoseconds it may be wrong at most."""
        time += self._origin
        total = 0 if self.known else UNREAD
        for one in self._maps:
            total += one.bound(time)
            time = one(time)
        return total


def chains(files: Mapping[int, RankSpans]) -> dict[int, Chain]:
    """Return for each rank how its times become those of the first one.

    Args:
        files: of all ranks, by rank.
    """
    first = min(files)
    roots = [rank for rank in sorted(files) if not files[rank].readings]
    if roots:
        first = roots[0]
    found: dict[int, Chain] = {}
    for rank, own in files.items():
        maps: list[ClockMap] = []
        at, seen = own, {rank}
        while at.readings and at.rank != first:
            parent = at.readings[0].parent
            if parent not in files or parent in seen:
                break
            # Readings count from the origin of their rank; a map takes the clock itself.
            maps.append(
                ClockMap([ClockReading(one.time + at.origin, one.parent, one.offset, one.bound) for one in at.readings])
            )
            at = files[parent]
            seen.add(parent)
        if at.rank == first:
            found[rank] = Chain(own.origin, maps)
        else:
            root = files[first]
            apart = ClockReading(0, first, (own.wall - own.origin) - (root.wall - root.origin), 0)
            found[rank] = Chain(own.origin, [ClockMap([apart])], known=False)
    return found
