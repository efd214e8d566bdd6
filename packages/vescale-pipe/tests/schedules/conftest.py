"""An oracle for schedules that shares only the data with the package: a checker and a simulator in plain Python."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from vescale_pipe._schedule import Action, Kind, Schedule

Price = float | Sequence[float]


@dataclass(frozen=True)
class Run:
    """What the simulator found."""

    makespan: float
    idle: list[float]
    """Per rank, of the whole makespan."""
    own: list[float]
    """Per rank, between its first start and its last end."""
    peak: list[float]
    """Per rank, most activations (of a stage) from F to the end of B or W."""


def at(price: Price, stage: int) -> float:
    return float(price) if isinstance(price, (int, float)) else price[stage]


def play(
    schedule: Schedule,
    forward: Price = 1.0,
    inputs: Price = 1.0,
    weights: Price = 1.0,
    whole: Price | None = None,
    latency: float = 0.0,
    overlap: float = 0.0,
) -> Run:
    """Start each action as early as its rank and what it needs allow."""
    ranks, last = range(schedule.num_ranks), schedule.num_stages - 1
    rows = [list(schedule.actions(rank)) for rank in ranks]
    pairs = [set(schedule.joined(rank)) for rank in ranks]
    place, clock, busy = [0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
    begin: list[float | None] = [None for _ in ranks]
    live, peak = [0 for _ in ranks], [0.0 for _ in ranks]
    done: dict[tuple[str, int, int], float] = {}

    def seconds(action: Action) -> float:
        stage = action.stage
        if action.kind is Kind.B:
            return at(inputs, stage) + at(weights, stage) if whole is None else at(whole, stage)
        return at({Kind.F: forward, Kind.I: inputs, Kind.W: weights}[action.kind], stage)

    def needs(action: Action) -> list[tuple[str, int, int]]:
        kind, stage, m = action
        if kind is Kind.F:
            return [("F", stage - 1, m)] if stage else []
        if kind is Kind.W:
            return [("I", stage, m)]
        return [("F", stage, m)] + ([("grad", stage + 1, m)] if stage < last else [])

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while place[rank] < len(rows[rank]):
                group = rows[rank][place[rank] : place[rank] + (2 if place[rank] in pairs[rank] else 1)]
                wanted = [need for action in group for need in needs(action)]
                if not all(need in done for need in wanted):
                    break
                away = [0.0 if schedule.placement[stage] == rank else latency for _, stage, _ in wanted]
                start = max([clock[rank], *(done[n] + extra for n, extra in zip(wanted, away, strict=True))])
                costs = sorted(seconds(action) for action in group)
                cost = costs[-1] + sum(costs[:-1]) * (1 - overlap)
                for kind, stage, m in group:
                    live[rank] += kind is Kind.F
                    peak[rank] = max(peak[rank], live[rank])
                    done[kind.name, stage, m] = start + cost
                    if kind in (Kind.B, Kind.I):
                        done["grad", stage, m] = start + cost
                live[rank] -= sum(action.kind in (Kind.B, Kind.W) for action in group)
                begin[rank] = start if begin[rank] is None else begin[rank]
                clock[rank], busy[rank] = start + cost, busy[rank] + cost
                place[rank] += len(group)
                moved = True
    stuck = {rank: str(rows[rank][place[rank]]) for rank in ranks if place[rank] < len(rows[rank])}
    assert not stuck, f"ranks wait for ever: {stuck}"
    makespan = max(clock)
    return Run(
        makespan,
        [makespan - some for some in busy],
        [end - (first or 0.0) - some for end, first, some in zip(clock, begin, busy, strict=True)],
        peak,
    )


def check(schedule: Schedule) -> None:
    """Assert that all is there once, on its rank, can run, and adds gradients in the order of the micro-batches."""
    found = [(rank, action) for rank in range(schedule.num_ranks) for action in schedule.actions(rank)]
    actions = {action for _, action in found}
    assert len(actions) == len(found)
    assert all(schedule.placement[action.stage] == rank for rank, action in found)
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            assert Action(Kind.F, stage, m) in actions
            back = {kind for kind in (Kind.B, Kind.I, Kind.W) if Action(kind, stage, m) in actions}
            assert back in ({Kind.B}, {Kind.I, Kind.W})
            actions -= {Action(kind, stage, m) for kind in Kind}
        added = [one.microbatch for _, one in found if one.stage == stage and one.kind in (Kind.B, Kind.W)]
        assert added == list(range(schedule.num_microbatches))
    assert not actions
    for rank in range(schedule.num_ranks):
        pairs = schedule.joined(rank)
        assert all(later - first > 1 for first, later in itertools.pairwise(pairs))
        assert all(pair < len(schedule.actions(rank)) - 1 for pair in pairs)
    play(schedule)


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Run]:
    """The simulator."""
    return play


@pytest.fixture(scope="session")
def checked() -> Callable[[Schedule], None]:
    """The checker."""
    return check
