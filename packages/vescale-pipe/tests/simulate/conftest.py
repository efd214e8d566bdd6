"""Schedules by text, random valid ones, and a naive simulation to compare with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from vescale_pipe._schedule import Action, Kind, Schedule, parse_action
from vescale_pipe._simulate import Costs

Edges = list[tuple[int, int]]


@pytest.fixture
def written() -> Callable[..., Schedule]:
    """Make a schedule of a line per rank; "(a b)" stands for a joined pair."""

    def make(*lines: str, placement: list[int] | None = None) -> Schedule:
        actions, joined = [], []
        for rank, line in enumerate(lines):
            row: list[Action] = []
            for word in line.split():
                if word.startswith("("):
                    joined.append((rank, len(row)))
                row.append(parse_action(word.strip("()")))
            actions.append(row)
        every = list(itertools.chain.from_iterable(actions))
        return Schedule.of(
            "written",
            list(range(1 + max(action.stage for action in every))) if placement is None else placement,
            1 + max(action.microbatch for action in every),
            actions,
            joined,
        )

    return make


@pytest.fixture
def random_schedule() -> Callable[[random.Random], tuple[Schedule, Edges]]:
    """Make a valid schedule, with its edges: a random order in which all could be done one after another."""

    def make(draw: random.Random) -> tuple[Schedule, Edges]:
        ranks = draw.randint(1, 4)
        stages = ranks + draw.randint(0, 3)
        microbatches = draw.randint(1, 5)
        placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
        draw.shuffle(placement)
        edges = [(a, b) for a in range(stages) for b in range(a + 1, stages) if b == a + 1 or draw.random() < 0.2]
        waits: dict[Action, set[Action]] = {}
        for m in range(microbatches):
            last = {}
            for s in reversed(range(stages)):
                style = draw.choice(["B", "I W", "none" if s == 0 else "B"])
                last[s] = None if style == "none" else Action(Kind[style[0]], s, m)
                waits[Action(Kind.F, s, m)] = {Action(Kind.F, a, m) for a, b in edges if b == s}
                if last[s] is not None:
                    taken = {last[b] for a, b in edges if a == s and last[b] is not None}
                    waits[last[s]] = taken | {Action(Kind.F, s, m)}
                if style == "I W":
                    waits[Action(Kind.W, s, m)] = {last[s]}
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        joined, done = [], set()
        while len(done) < len(waits):
            ready = [action for action in waits if action not in done and waits[action] <= done]
            action = draw.choice(ready)
            rank = placement[action.stage]
            others = [other for other in ready if other != action and placement[other.stage] == rank]
            unit = [action]
            if others and draw.random() < 0.3:
                joined.append((rank, len(rows[rank])))
                unit.append(draw.choice(others))
            rows[rank] += unit
            done |= set(unit)
        return Schedule.of("random", placement, microbatches, rows, joined), edges

    return make


@pytest.fixture
def random_costs() -> Callable[[random.Random, Schedule], Costs]:
    """Make costs that are ugly numbers, different for each stage and rank."""

    def make(draw: random.Random, schedule: Schedule) -> Costs:
        def each() -> list[float]:
            return [draw.choice([0.0, draw.uniform(0.1, 3.0), draw.uniform(0.1, 3.0)]) for _ in schedule.placement]

        return Costs(
            forward=each(),
            backward=each(),
            input_grad=each(),
            weight_grad=each(),
            latency=draw.choice([0.0, draw.random()]),
            bytes_per_second=draw.choice([None, draw.uniform(1.0, 5.0)]),
            message_bytes=each(),
            activation=each(),
            kept_for_weights=each(),
            overlap=draw.random(),
            rank_speed=[draw.uniform(0.5, 2.0) for _ in range(schedule.num_ranks)],
            link=draw.choice(["free", "fifo"]),
        )

    return make


@pytest.fixture
def naive() -> Callable[..., dict[Action, tuple[float, float]]]:
    """Find start and end of each action by going over all of them until nothing changes any more.

    `idle` gives seconds that an action waits for nothing: an argument to find other times that respect the schedule.
    """

    def simulate(
        schedule: Schedule, costs: Costs, edges: Edges, idle: Callable[[Action], float] = lambda action: 0.0
    ) -> dict[Action, tuple[float, float]]:
        stages = len(schedule.placement)
        names = ("forward", "backward", "input_grad", "weight_grad")
        table = {kind: getattr(costs, name) for kind, name in zip(Kind, names, strict=True)}
        speed = costs.rank_speed or [1.0] * schedule.num_ranks
        every = {action for rank in range(schedule.num_ranks) for action in schedule.actions(rank)}
        backward = {(a.stage, a.microbatch): a for a in every if a.kind in (Kind.B, Kind.I)}
        units: list[tuple[int, list[Action]]] = []
        for rank in range(schedule.num_ranks):
            actions, index = schedule.actions(rank), 0
            while index < len(actions):
                size = 2 if index in schedule.joined(rank) else 1
                units.append((rank, list(actions[index : index + size])))
                index += size

        def seconds(rank: int, unit: list[Action]) -> float:
            each = sorted(table[action.kind][action.stage] / speed[rank] for action in unit)
            return each[0] if len(unit) == 1 else each[1] + (1 - costs.overlap) * each[0]

        def takers(action: Action) -> list[tuple[Action, float]]:
            """Who takes what an action gives, and the bytes of it."""
            size = costs.message_bytes
            if action.kind == Kind.F:
                return [
                    (Action(Kind.F, b, action.microbatch), size[action.stage]) for a, b in edges if a == action.stage
                ]
            if action.kind == Kind.W:
                return []
            back = [(backward.get((a, action.microbatch)), size[a]) for a, b in edges if b == action.stage]
            return [(taker, bytes_) for taker, bytes_ in back if taker is not None]

        times = dict.fromkeys(every, (0.0, 0.0))
        while True:
            arrives: dict[Action, float] = dict.fromkeys(every, 0.0)
            free: dict[tuple[int, int], float] = {}
            for rank, unit in units:
                for action in unit:
                    for taker, size in sorted(takers(action), key=lambda pair: pair[0].stage):
                        there, leaves, delay = schedule.placement[taker.stage], times[action][1], 0.0
                        if there != rank:
                            transfer = 0.0 if costs.bytes_per_second is None else size / costs.bytes_per_second
                            delay = transfer + costs.latency
                            if costs.link == "fifo":
                                leaves = max(leaves, free.get((rank, there), 0.0))
                                free[rank, there] = leaves + transfer
                        arrives[taker] = max(arrives[taker], leaves + delay)
            new: dict[Action, tuple[float, float]] = {}
            clock = [0.0] * schedule.num_ranks
            for rank, unit in units:
                start = max([clock[rank], *(arrives[action] for action in unit)]) + idle(unit[0])
                clock[rank] = start + seconds(rank, unit)
                new.update(dict.fromkeys(unit, (start, clock[rank])))
            if new == times:
                return times
            times = new
            assert max(clock) < 1e6, stages

    return simulate
