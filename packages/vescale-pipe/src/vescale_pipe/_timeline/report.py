"""Who makes a step slow: ranks, mesh axes, links, and the bubble as it was, as it should be, and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from statistics import median

from .._simulate import Costs
from .merge import Merged, MergedRank, merge
from .recording import Timeline
from .replay import Pipeline, pipelines, saved_by
from .work import Baseline, Work, baselines, covered, works

__all__ = ["LinkReport", "RankReport", "Report", "report"]

USUAL = "pp"
"""Axis of a mesh along which pipelines go, if nothing else is said."""
SLOW = 1.1
"""Ranks that take so many times what they should are stragglers."""
RUNS = 4096
"""About so many pipelines are simulated again, in at most 8 steps."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """How fast one rank is."""

    rank: int
    """Its number."""
    coordinates: Mapping[str, int]
    """Where it is on each axis of the mesh."""
    busy: float
    """Seconds a step that it computes."""
    slowdown: float
    """What its actions took over what they should; 1 is as fast as others."""
    excess: float
    """Seconds a step that it takes too long; negative if it is faster than others."""
    blame: float | None
    """Seconds by which a step would be shorter if the rank took what it should; None if that is not known."""
    trend: float
    """What its actions took in the last quarter of the steps over the first one."""
    compared: str
    """With whom: "peers" that hold the same stage, other "stages" (which may just be smaller), or "itself"."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How long messages from one rank to another are waited for."""

    src: int
    """Rank that sends."""
    dst: int
    """Rank that gets."""
    messages: int
    """How many."""
    median: float
    """Seconds from when it was sent, and its receiver had nothing else to do, until it was there."""
    total: float
    """Seconds a step."""


@dataclass(frozen=True, slots=True)
class Report:
    """What makes steps as long as they are."""

    ranks: tuple[RankReport, ...]
    """The one that costs most first."""
    links: tuple[LinkReport, ...]
    """The slowest first."""
    steps: Mapping[int, float]
    """Seconds of each step, from the first start to the last end of an action."""
    bubble: float | None
    """Share of ranks x step in which ranks computed nothing, as it was."""
    usual_bubble: float | None
    """The same, simulated, if every rank took what it should and messages took no time."""
    paper_bubble: float | None
    """(P - 1) / (v M + P - 1), that of 1F1B with P ranks, v stages a rank, M micro-batches, all stages equal."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def stragglers(self) -> tuple[RankReport, ...]:
        """Ranks that take 1.1 times what they should and more, the one that costs most first."""
        return tuple(one for one in self.ranks if one.slowdown >= SLOW)

    @property
    def axes(self) -> dict[str, int] | None:
        """What all stragglers have in common on the mesh, such as {"dp": 1}, if they are all that have it in common."""
        slow = self.stragglers
        if not slow or len(slow) == len(self.ranks):
            return None
        shared = dict(set.intersection(*(set(one.coordinates.items()) for one in slow)))
        same = [one for one in self.ranks if shared.items() <= one.coordinates.items()]
        # In the order of the mesh; what holds for all ranks says nothing.
        shared = {
            name: place
            for name, place in slow[0].coordinates.items()
            if name in shared and any(one.coordinates.get(name) != place for one in self.ranks)
        }
        return shared if shared and len(same) == len(slow) else None

    def __str__(self) -> str:
        from .tables import report_text

        return report_text(self)


def report(
    what: Merged | Iterable[str | PathLike[str] | Timeline] | str | PathLike[str],
    *,
    axis: str | None = None,
    edges: Iterable[tuple[int, int]] | None = None,
) -> Report:
    """Find out which ranks and links make the steps of a pipeline slow.

    Each action is compared with what other ranks take for the same stage, without the waiting inside of it. Then
    steps are simulated again with the measured times, with one rank at a time as fast as its peers: what that saves
    is what the rank is to blame for.

    Args:
        what: a merged timeline, or what `merge` takes.
        axis: of the mesh, along which the pipeline goes; None: "pp", or the only one.
        edges: (producer stage, consumer stage); None: each gives to the next.

    Raises:
        ValueError: as `merge` does; or there is no action of a schedule in it; or the mesh has no such axis.
    """
    merged = what if isinstance(what, Merged) else merge(what)
    axis = chosen_axis(merged, axis)
    some = works(merged)
    if not some:
        raise ValueError("the timeline has no actions of a schedule, so that there is nothing to compare.")
    numbers = sorted({work.step for work in some})
    baseline = baselines(some)
    links = _links(merged, len(numbers))
    latency = median(one.median for one in links) if links else 0.0
    edges = None if edges is None else tuple(edges)
    whole = pipelines(merged.ranks, some, baseline, axis=axis, latency=latency, edges=edges)
    chosen = _spread(list(whole.values()), max(1, min(8, RUNS // len(merged.ranks))))
    notes = list(merged.notes)
    if not whole:
        notes.append("no step is whole, with one pipeline per place on the other axes: ranks have no blame.")
    ranks = [_rank(one, some_of, baseline, numbers) for one, some_of in _by_rank(merged, some)]
    if chosen:
        # Who takes no longer than others has nothing to save.
        saved = saved_by(chosen, [one.rank for one in ranks if one.excess > 0])
        ranks = [replace(one, blame=saved.get(one.rank, 0.0)) for one in ranks]
    ranks.sort(key=lambda one: (one.blame or 0.0, one.excess), reverse=True)
    lengths, busy = _steps(some)
    return Report(
        tuple(ranks),
        tuple(links),
        lengths,
        1 - busy / (sum(lengths.values()) * len(merged.ranks)) if sum(lengths.values()) else None,
        _usual_bubble(chosen),
        _paper_bubble(chosen),
        tuple(notes),
    )


def chosen_axis(merged: Merged, axis: str | None) -> str:
    """Return the axis of the mesh along which the pipeline goes.

    Args:
        merged: all ranks.
        axis: that was asked for; None: "pp", or the only one.

    Raises:
        ValueError: there is no such axis, or it is not clear which is meant.
    """
    axes = tuple(dict.fromkeys(name for one in merged.ranks for name in one.coordinates))
    if axis in axes or (not axes and axis in (None, USUAL)):
        return axis or USUAL
    if not axes:
        raise ValueError(f"axis: {axis!r} given; this timeline was recorded without a mesh (mesh= of start or record).")
    listed = ", ".join(axes)
    if axis is not None:
        raise ValueError(f"axis: {axis!r} given; the mesh of this timeline has {listed}.")
    if USUAL in axes or len(axes) == 1:
        return USUAL if USUAL in axes else axes[0]
    raise ValueError(f"axis: the mesh of this timeline has {listed}, none called {USUAL!r}: name that of the pipeline.")


def _spread(some: list[list[Pipeline]], most: int) -> list[list[Pipeline]]:
    """Return at most so many of a list, spread over it."""
    if len(some) <= most:
        return some
    if most == 1:
        return some[-1:]
    return [some[place * (len(some) - 1) // (most - 1)] for place in range(most)]


def _by_rank(merged: Merged, some: Sequence[Work]) -> Iterable[tuple[MergedRank, list[Work]]]:
    rows: dict[int, list[Work]] = {}
    for work in some:
        rows.setdefault(work.rank, []).append(work)
    return [(one, rows.get(one.rank, [])) for one in merged.ranks]


def _rank(
    one: MergedRank,
    own: Sequence[Work],
    baseline: Mapping[tuple[int, str, int], Baseline],
    numbers: Sequence[int],
) -> RankReport:
    took = sum(work.clean for work in own)
    should = sum(baseline[work.rank, work.kind, work.stage].clean for work in own)
    compared = {baseline[work.rank, work.kind, work.stage].of for work in own}
    weakest = next((name for name in ("itself", "stages", "peers") if name in compared), "itself")
    quarter = max(1, len(numbers) // 4)
    first, last = set(numbers[:quarter]), set(numbers[-quarter:])
    early = [work.clean for work in own if work.step in first]
    late = [work.clean for work in own if work.step in last]
    trend = (sum(late) / len(late)) / (sum(early) / len(early)) if early and late and sum(early) else 1.0
    return RankReport(
        one.rank,
        one.coordinates,
        took / 1e9 / len(numbers),
        took / should if should else 1.0,
        (took - should) / 1e9 / len(numbers),
        None,
        trend,
        weakest,
    )


def _links(merged: Merged, steps: int) -> list[LinkReport]:
    waits: dict[tuple[int, int], list[int]] = {}
    for message in merged.messages:
        waits.setdefault((message.src, message.dst), []).append(message.exposed)
    found = [
        LinkReport(src, dst, len(some), median(some) / 1e9, sum(some) / 1e9 / steps)
        for (src, dst), some in waits.items()
    ]
    return sorted(found, key=lambda one: one.median, reverse=True)


def _steps(some: Sequence[Work]) -> tuple[dict[int, float], float]:
    """Return the seconds of each step, and those that ranks computed in all."""
    rows: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for work in some:
        rows.setdefault(work.step, {}).setdefault(work.rank, []).append((work.start, work.start + work.length))
    lengths, busy = {}, 0
    for step, ranks in sorted(rows.items()):
        spans = [span for own in ranks.values() for span in own]
        lengths[step] = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
        busy += sum(map(covered, ranks.values()))
    return lengths, busy / 1e9


def _usual_bubble(chosen: Sequence[Sequence[Pipeline]]) -> float | None:
    """Return the bubble if all ranks took what they should, and messages no time."""
    if not chosen:
        return None
    runs = [[replace(one, costs=Costs()).run(one.ranks) for one in some] for some in chosen]
    spans = sum(max(run.makespan for run in some) * sum(len(run.busy) for run in some) for some in runs)
    return 1 - sum(sum(run.busy) for some in runs for run in some) / spans if spans else None


def _paper_bubble(chosen: Sequence[Sequence[Pipeline]]) -> float | None:
    if not chosen:
        return None
    schedule = chosen[0][0].schedule
    ranks, chunks = schedule.num_ranks, schedule.num_stages / schedule.num_ranks
    return (ranks - 1) / (chunks * schedule.num_microbatches + ranks - 1)
