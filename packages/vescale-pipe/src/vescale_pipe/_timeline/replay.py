"""Steps simulated again with what their actions took: what would it be worth if one rank were as fast as its peers?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._schedule import Action, Kind, Schedule
from .._simulate import Costs, Simulation, simulate
from ..errors import ScheduleError
from .merge import MergedRank
from .work import Baseline, Work

__all__ = ["Pipeline", "pipelines", "saved_by"]


@dataclass(slots=True)
class Pipeline:
    """One pipeline in one step, ready to be simulated."""

    ranks: tuple[int, ...]
    """In the order of their stages."""
    schedule: Schedule
    """What they did in which order."""
    durations: list[Tensor]
    """Per rank the seconds of each action."""
    usual: list[Tensor]
    """And what they should take."""
    costs: Costs
    """Of messages."""
    edges: tuple[tuple[int, int], ...] | None
    """Between stages; None: each gives to the next."""

    def run(self, usual: Iterable[int] = ()) -> Simulation:
        """Simulate it.

        Args:
            usual: ranks that take what they should.
        """
        chosen = set(usual)
        times = [
            usual_one if rank in chosen else one
            for rank, one, usual_one in zip(self.ranks, self.durations, self.usual, strict=True)
        ]
        return simulate(self.schedule, self.costs, self.edges, durations=times)


def pipelines(
    ranks: Sequence[MergedRank],
    works: Sequence[Work],
    baseline: Mapping[tuple[int, str, int], Baseline],
    *,
    axis: str,
    latency: float,
    edges: Iterable[tuple[int, int]] | None,
) -> dict[int, list[Pipeline]]:
    """Return per step its pipelines, for steps of which all actions are known.

    Args:
        ranks: all ranks. Those that differ only on `axis` make a pipeline; without that axis, all of them do.
        works: their actions.
        baseline: what these should take.
        axis: of the mesh, along which the pipeline goes.
        latency: seconds of a message.
        edges: between stages; None: each gives to the next.
    """
    group_of = {
        one.rank: tuple((name, place) for name, place in one.coordinates.items() if name != axis) for one in ranks
    }
    chain = None if edges is None else tuple(edges)
    rows: dict[int, dict[object, dict[int, list[Work]]]] = {}
    for work in works:
        rows.setdefault(work.step, {}).setdefault(group_of[work.rank], {}).setdefault(work.rank, []).append(work)
    found = {}
    for step, groups in sorted(rows.items()):
        some = [_pipeline(group, baseline, latency, chain) for group in groups.values()]
        whole = [one for one in some if one is not None]
        if whole and len(whole) == len(set(group_of.values())):
            found[step] = whole
    return found


def _pipeline(
    group: Mapping[int, list[Work]],
    baseline: Mapping[tuple[int, str, int], Baseline],
    latency: float,
    edges: tuple[tuple[int, int], ...] | None,
) -> Pipeline | None:
    """Return a pipeline; None if something is missing, so that it could not run."""
    owner: dict[int, int] = {}
    for rank, works in group.items():
        for work in works:
            if owner.setdefault(work.stage, rank) != rank:
                return None
    if sorted(owner) != list(range(len(owner))):
        return None
    ranks = tuple(dict.fromkeys(owner[stage] for stage in range(len(owner))))
    place = {rank: number for number, rank in enumerate(ranks)}
    ordered = [sorted(group[rank], key=lambda work: work.start) for rank in ranks]
    count = 1 + max(work.microbatch for works in ordered for work in works)
    schedule = Schedule.of(
        "measured",
        [place[owner[stage]] for stage in range(len(owner))],
        count,
        [[Action(Kind[work.kind], work.stage, work.microbatch) for work in works] for works in ordered],
    )
    durations = [torch.tensor([work.length / 1e9 for work in works], dtype=torch.float64) for works in ordered]
    # What an action spent on other things than computing is not its rank's to save.
    usual = [
        torch.tensor(
            [(baseline[rank, work.kind, work.stage].clean + work.length - work.clean) / 1e9 for work in works],
            dtype=torch.float64,
        )
        for rank, works in zip(ranks, ordered, strict=True)
    ]
    pipeline = Pipeline(ranks, schedule, durations, usual, Costs(latency=latency), edges)
    try:
        pipeline.run()
    except ScheduleError:
        return None
    return pipeline


def saved_by(steps: Sequence[Sequence[Pipeline]], ranks: Iterable[int]) -> dict[int, float]:
    """Return the seconds a step that it would save if a rank took what it should; a step ends with its last pipeline.

    Args:
        steps: per step its pipelines.
        ranks: the ranks, of which one at a time is tried.
    """
    wanted = set(ranks)
    found = dict.fromkeys(wanted, 0.0)
    for some in steps:
        now = [one.run().makespan for one in some]
        for place, one in enumerate(some):
            others = max((end for number, end in enumerate(now) if number != place), default=0.0)
            for rank in wanted.intersection(one.ranks):
                found[rank] += max(now) - max(others, one.run([rank]).makespan)
    return {rank: saved / len(steps) for rank, saved in found.items()}
