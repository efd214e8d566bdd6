"""Schedules that nobody wrote: valid ones give the bits of one device in the simulated time, others are refused.

A stage takes values of any stages before it; placement, order, and which backwards are in two parts, are random.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe import Costs, build_schedule, manual, problems, simulate
from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.wiring import wire
from vescale_pipe._schedule import Action, Kind, Schedule
from vescale_pipe._schedules.registry import BUILT_IN
from vescale_pipe._split import Port, Stage, StageGraph
from vescale_pipe._split.tree import Slot
from vescale_pipe._transport import LocalHub, LocalTransport
from vescale_pipe.errors import ScheduleError

F, B, I, W = Kind  # noqa: E741 -- the letters that papers use
Edges = list[tuple[int, int]]
SEEDS = st.integers(0, 2**32 - 1)


class Piece(nn.Module):
    """Takes any number of values and returns two; each is used twice."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(inputs))
        self.out = nn.Linear(4, 4)

    def forward(self, *values: Tensor) -> tuple[Tensor, Tensor]:
        total = sum(torch.tanh(one(value)) * value for one, value in zip(self.mix, values, strict=True))
        return self.out(total), torch.sigmoid(total)


def random_graph(rng: random.Random, count: int) -> tuple[StageGraph, Edges]:
    """Mostly each stage takes the value before it, and any others; what nobody takes goes to the last stage."""
    edges = {(p, c) for c in range(count) for p in range(c) if rng.random() < (0.8 if p == c - 1 else 0.4)}
    edges |= {(p, count - 1) for p in range(count - 1) if not any(one == p for one, _ in edges)}
    stages = []
    for index in range(count):
        ports = [Port("stage", p, rng.randrange(2)) for p in range(index) if (p, index) in edges]
        if not ports or rng.random() < 0.2:
            ports.insert(0, Port("batch", 0, 0))
        stages.append(Stage(index, Piece(len(ports)), tuple(ports), 2, (True, True)))
    return StageGraph(tuple(stages), (), template=Slot(0)), sorted(edges)


def random_schedule(rng: random.Random, edges: Edges, stages: int, ranks: int, count: int) -> Schedule:
    """Take any action that may come next, until all are done; micro-batches of a stage are in their order.

    One in four lets whole backwards pass weight gradients of earlier micro-batches.
    """
    loose = rng.random() < 0.25
    placement = list(range(ranks)) + [rng.randrange(ranks) for _ in range(stages - ranks)]
    rng.shuffle(placement)
    halves = {(s, m): rng.random() < 0.5 for s in range(stages) for m in range(count)}
    before = {s: [p for p, c in edges if c == s] for s in range(stages)}
    after = {s: [c for p, c in edges if p == s] for s in range(stages)}
    todo = {"F": [0] * stages, "B": [0] * stages, "W": [0] * stages}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while True:
        ready = []
        for s in range(stages):
            f, b, w = todo["F"][s], todo["B"][s], todo["W"][s]
            while w < b and not halves[s, w]:
                w = todo["W"][s] = w + 1
            if f < count and all(todo["F"][one] > f for one in before[s]):
                ready.append((s, "F"))
            # A whole backward also adds gradients of weights, so those of earlier micro-batches should be done.
            if b < f and all(todo["B"][one] > b for one in after[s]) and (halves[s, b] or w == b or loose):
                ready.append((s, "B"))
            if w < b:
                ready.append((s, "W"))
        if not ready:
            break
        s, what = rng.choice(ready)
        m = todo[what][s]
        kind = {"F": F, "B": I if halves.get((s, m)) else B, "W": W}[what]
        lists[placement[s]].append(Action(kind, s, m))
        todo[what][s] += 1
    return Schedule.of("random", placement, count, lists)


def drawn(seed: int, stages: int, count: int) -> tuple[random.Random, StageGraph, Schedule]:
    rng = random.Random(seed)
    torch.manual_seed(seed % 1000)
    graph, edges = random_graph(rng, stages)
    return rng, graph, random_schedule(rng, edges, stages, rng.randint(1, stages), count)


def made(graph: StageGraph, schedule: Schedule) -> PipeEngine:
    plan = PipePlan(schedule=schedule, num_microbatches=schedule.num_microbatches)
    return PipeEngine(graph, None, plan, functional.mse_loss, act_out=schedule.num_ranks)


def check(engine: PipeEngine, graph: StageGraph, count: int) -> None:
    """Run a step, and compare it with a loop on one device.

    Where stages side by side run in an order in which a value cannot be passed on from one to the next, each adds up
    its own parts of the gradient, so that last bits differ.
    """
    (form,) = set(engine._forms.made.values())
    exact = form.wiring.edges == wire(graph).edges
    same: Callable[[Tensor, Tensor], bool] = torch.equal if exact else torch.allclose
    twins = copy.deepcopy([stage.module for stage in graph.stages])
    x, y = torch.randn(count + 3, 4), torch.randn(count + 3, 4)
    loss, _ = engine(x, target=y)
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        values: list[tuple[Tensor, Tensor]] = []
        for stage, module in zip(graph.stages, twins, strict=True):
            given = [a if port.source == "batch" else values[int(port.key)][port.index] for port in stage.inputs]
            values.append(module(*given))
        part = functional.mse_loss(values[-1][0], b) * (len(a) / len(x))
        part.backward()
        total = total + part.detach()
    assert torch.equal(loss, total)
    for stage, module in zip(graph.stages, twins, strict=True):
        for mine, theirs in zip(stage.module.parameters(), module.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                assert same(mine.grad, theirs.grad)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 6))
def test_any_valid_schedule_gives_the_bits_of_one_device(seed: int, stages: int, count: int) -> None:
    _, graph, schedule = drawn(seed, stages, count)
    check(made(graph, schedule), graph, count)


def damage(rng: random.Random, schedule: Schedule) -> Schedule:
    """Change one thing."""
    lists = [list(schedule.actions(rank)) for rank in range(schedule.num_ranks)]
    row = rng.choice([one for one in lists if one])
    place, other = rng.randrange(len(row)), rng.randrange(len(row))
    how = rng.choice(["swap", "swap", "drop", "repeat", "move", "kind", "microbatch"])
    if how == "swap":
        row[place], row[other] = row[other], row[place]
    elif how == "drop":
        del row[place]
    elif how == "repeat":
        row.insert(other, row[place])
    elif how == "move":
        rng.choice(lists).append(row.pop(place))
    elif how == "kind":
        row[place] = row[place]._replace(kind=rng.choice(list(Kind)))
    else:
        row[place] = row[place]._replace(microbatch=rng.randrange(schedule.num_microbatches + 1))
    return Schedule.of("damaged", schedule.placement, schedule.num_microbatches, lists)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_what_is_invalid_is_refused_before_anything_runs(seed: int, stages: int, count: int) -> None:
    """A schedule that is not refused gives the bits of one device, if gradients are still added in their order."""
    rng, graph, schedule = drawn(seed, stages, count)
    edges = [(int(port.key), stage.index) for stage in graph.stages for port in stage.inputs if port.source == "stage"]
    damaged = damage(rng, schedule)
    calls = []
    for stage in graph.stages:
        stage.module.register_forward_pre_hook(lambda *_: calls.append(1))
    if problems(damaged, edges=sorted(set(edges))):
        with pytest.raises(ScheduleError):
            made(graph, damaged)
        assert not calls
        return
    engine = made(graph, damaged)
    for stage in graph.stages:
        stage.module._forward_pre_hooks.clear()
    if all(action.kind is F for rank in range(damaged.num_ranks) for action in damaged.actions(rank)):
        with pytest.raises(ScheduleError, match="'damaged' has forwards only"):
            check(engine, graph, count)
    elif not problems(damaged, edges=sorted(set(edges)), canonical=True):
        check(engine, graph, count)


# -- time


class Clock:
    """The time of each rank, and of each message that is under way."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.now: dict[int, float] = {}
        self.left: dict[tuple[int, int, int], float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let all transports take part."""
        clock = self
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalHub, "transport", lambda hub, rank: Timed(hub, rank, clock))
            yield


class Timed(LocalTransport):
    """Messages that take their time, as the ranks' clocks have it: no second passes."""

    def __init__(self, hub: LocalHub, rank: int, clock: Clock) -> None:
        super().__init__(hub, rank)
        self.clock = clock
        clock.now[rank] = 0.0

    def send(self, dst: int, tag: int, values: Any) -> Any:
        self.clock.left[self.rank, dst, tag] = self.clock.now[self.rank]
        return super().send(dst, tag, values)

    def recv(self, src: int, tag: int) -> Any:
        inner, clock, rank = super().recv(src, tag), self.clock, self.rank

        class Expected:
            def ready(self) -> bool:
                return inner.ready()

            def wait(self) -> list[Any]:
                got = inner.wait()
                came = clock.left.pop((src, rank, tag)) + clock.latency
                clock.now[rank] = max(clock.now[rank], came)
                return got

        return Expected()


def timed(make: Callable[[], PipeEngine], schedule: Schedule, costs: Costs, count: int) -> None:
    """Run a step whose actions take what they cost, and compare each start and end with the simulation."""
    clock = Clock(costs.latency)
    with clock.running():
        engine = make()
    table = costs.seconds(schedule.num_stages).tolist()
    seen: dict[Action, tuple[float, float]] = {}

    def record(kind: Kind, stage: int, microbatch: int, start: int, end: int) -> None:
        rank = schedule.placement[stage]
        begun = clock.now[rank]
        clock.now[rank] += table[kind][stage]
        seen[Action(kind, stage, microbatch)] = (begun, clock.now[rank])

    engine.record = record
    engine(torch.randn(count, 4), target=torch.randn(count, 4))
    (form,) = set(engine._forms.made.values())
    found = simulate(schedule, costs, form.wiring.edges)
    assert max(end for _, end in seen.values()) == found.makespan
    for rank in range(schedule.num_ranks):
        starts, ends = found.start[rank].tolist(), found.end[rank].tolist()
        for action, start, end in zip(schedule.actions(rank), starts, ends, strict=True):
            assert seen.pop(action) == (start, end), action
    assert not seen


def random_costs(rng: random.Random, stages: int) -> Costs:
    """Draw eighths of a second, which add up without rounding."""
    columns = [[rng.randint(1, 24) / 8 for _ in range(stages)] for _ in range(3)]
    return Costs(
        forward=columns[0], input_grad=columns[1], weight_grad=columns[2], latency=rng.choice([0.0, 0.125, 1.0])
    )


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 6))
def test_a_step_takes_the_time_that_is_simulated(seed: int, stages: int, count: int) -> None:
    """The engine makes no rank wait for anything that the schedule does not make it wait for."""
    rng, graph, schedule = drawn(seed, stages, count)
    timed(lambda: made(graph, schedule), schedule, random_costs(rng, stages), count)


@pytest.mark.parametrize("name", BUILT_IN)
def test_schedules_with_a_name_take_the_time_that_is_simulated(name: str) -> None:
    for ranks, count in ((2, 3), (3, 5), (4, 8)):
        joined = build_schedule(name, ranks, count)
        # Pairs are run one after the other, so the first one's message leaves earlier than the simulator has it.
        rows = [joined.actions(rank) for rank in range(ranks)]
        schedule = Schedule.of(name, joined.placement, count, rows)
        graph = manual([nn.Linear(4, 4) for _ in range(schedule.num_stages)])
        costs = random_costs(random.Random(name), schedule.num_stages)
        timed(lambda graph=graph, schedule=schedule: made(graph, schedule), schedule, costs, count)  # type: ignore[misc]
