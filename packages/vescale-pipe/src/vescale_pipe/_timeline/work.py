"""What each rank computed, without the waiting that happened inside, and what its peers took for the same.

In a pipeline, the time that a slow rank costs shows as waiting on the others; only what was computed tells who it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from .merge import Merged
from .recorder import COMPUTE
from .span import Span

__all__ = ["Baseline", "Work", "baselines", "covered", "works"]


@dataclass(frozen=True, slots=True)
class Work:
    """One action of a rank."""

    rank: int
    """That did it."""
    step: int
    """Training step."""
    kind: str
    """F, B, I or W."""
    stage: int
    """Number of the stage."""
    microbatch: int
    """Number of the micro-batch."""
    start: int
    """Nanoseconds."""
    length: int
    """Nanoseconds from start to end."""
    clean: int
    """Nanoseconds without the spans of communication and other things in it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What an action should take on a rank."""

    clean: float
    """Nanoseconds."""
    of: str
    """Whom it is taken from: "peers" that hold the same stage, "stages" that others hold, or the rank "itself"."""


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end).

    Example:
        >>> covered([(0, 4), (2, 6), (8, 9)])
        7
    """
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or end > reached:
            total += end - (start if reached is None else max(start, reached))
            reached = end
    return total


def works(merged: Merged) -> list[Work]:
    """Return all actions of all ranks, by rank and start."""
    found = []
    for rank in merged.ranks:
        others: dict[int, list[Span]] = {}
        for span in rank.spans:
            if span.category != COMPUTE and not span.is_message:
                others.setdefault(span.track, []).append(span)
        starts = {track: [span.start for span in some] for track, some in others.items()}
        for span in rank.spans:
            if not span.is_action:
                continue
            begins = starts.get(span.track, [])
            first, last = bisect_left(begins, span.start), bisect_left(begins, span.end)
            inside = [(one.start, min(one.end, span.end)) for one in others.get(span.track, [])[first:last]]
            tags, clean = span.tags, span.length - covered(inside)
            found.append(
                Work(
                    rank.rank,
                    span.step,
                    tags["kind"],
                    tags["stage"],
                    tags["microbatch"],
                    span.start,
                    span.length,
                    clean,
                )
            )
    return found


Place = tuple[int, str, int]
"""Rank, kind and stage."""


def baselines(some: Sequence[Work]) -> dict[Place, Baseline]:
    """Return what each kind of action of each stage should take on each rank that did it.

    It is the median over the other ranks with the same stage of what they took in the mean, if there are any; else
    over the other stages; else what the rank itself took in the median. Means, for a rank that is slow only now and
    then makes the others wait too; a median over ranks, for one of them may be slow as well.
    """
    lists: dict[Place, list[int]] = {}
    for work in some:
        lists.setdefault((work.rank, work.kind, work.stage), []).append(work.clean)
    own = {place: fmean(values) for place, values in lists.items()}
    same_stage: dict[tuple[str, int], list[float]] = {}
    for (_, kind, stage), value in own.items():
        same_stage.setdefault((kind, stage), []).append(value)
    for group in same_stage.values():
        group.sort()
    found = {}
    for (rank, kind, stage), value in own.items():
        if len(same_stage[kind, stage]) > 1:
            found[rank, kind, stage] = Baseline(_median_without(same_stage[kind, stage], value), "peers")
            continue
        # A stage that one rank holds: there are as few of these as stages.
        others = [other for (r, k, _), other in own.items() if k == kind and r != rank]
        if others:
            found[rank, kind, stage] = Baseline(median(others), "stages")
        else:
            found[rank, kind, stage] = Baseline(median(lists[rank, kind, stage]), "itself")
    return found


def _median_without(values: Sequence[float], one: float) -> float:
    """Return the median of sorted values of which one was taken out.

    Example:
        >>> _median_without([1.0, 2.0, 9.0], 2.0), _median_without([1.0, 2.0, 9.0, 9.0], 9.0)
        (5.0, 2.0)
    """
    out, count = bisect_left(values, one), len(values) - 1
    low, high = (place + (place >= out) for place in ((count - 1) // 2, count // 2))
    return (values[low] + values[high]) / 2
