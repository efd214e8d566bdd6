"""Schedules that nobody wrote: any valid order, placement and halving of backwards gives the same bits."""

from __future__ import annotations

import copy
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._schedule import Action, Kind, Schedule
from vescale_pipe._split import Port, Stage, StageGraph
from vescale_pipe._split.tree import Slot

F, B, I, W = Kind  # noqa: E741 -- the letters that papers use


class Piece(nn.Module):
    """Takes any number of values and returns two; each is used twice."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(inputs))
        self.out = nn.Linear(4, 4)

    def forward(self, *values: Tensor) -> tuple[Tensor, Tensor]:
        total = sum(torch.tanh(one(value)) * value for one, value in zip(self.mix, values, strict=True))
        return self.out(total), torch.sigmoid(total)


def random_graph(rng: random.Random, count: int) -> StageGraph:
    """Each stage takes the value before it and any others."""
    stages = []
    for index in range(count):
        ports = [Port("batch", 0, 0)] if index == 0 else [Port("stage", index - 1, rng.randrange(2))]
        ports += [Port("stage", made, rng.randrange(2)) for made in range(index) if rng.random() < 0.5]
        stages.append(Stage(index, Piece(len(ports)), tuple(ports), 2, (True, True)))
    return StageGraph(tuple(stages), (), template=Slot(0))


def random_schedule(rng: random.Random, stages: int, ranks: int, count: int) -> Schedule:
    """Take any action that may come next, until all are done; micro-batches of a stage are in their order."""
    placement = list(range(ranks)) + [rng.randrange(ranks) for _ in range(stages - ranks)]
    rng.shuffle(placement)
    halves = {(s, m): rng.random() < 0.5 for s in range(stages) for m in range(count)}
    todo = {"F": [0] * stages, "B": [0] * stages, "W": [0] * stages}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while any(number < count for numbers in todo.values() for number in numbers):
        ready = []
        for s in range(stages):
            f, b, w = todo["F"][s], todo["B"][s], todo["W"][s]
            if f < count and (s == 0 or todo["F"][s - 1] > f):
                ready.append((s, "F"))
            # A whole backward also adds gradients of weights, so those of earlier micro-batches must be done.
            if b < f and (s == stages - 1 or todo["B"][s + 1] > b) and (halves[s, b] or w == b):
                ready.append((s, "B"))
            if w < b and halves[s, w]:
                ready.append((s, "W"))
        s, what = rng.choice(ready)
        m = todo[what][s]
        kind = {"F": F, "B": I if halves.get((s, m)) else B, "W": W}[what]
        lists[placement[s]].append(Action(kind, s, m))
        todo[what][s] += 1
        if kind is B:
            todo["W"][s] += 1
    return Schedule.of("random", placement, count, lists)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6))
def test_any_valid_schedule_gives_the_bits_of_one_device(seed: int, stages: int, count: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed % 1000)
    graph = random_graph(rng, stages)
    twins = copy.deepcopy([stage.module for stage in graph.stages])
    ranks = rng.randint(1, stages)
    schedule = random_schedule(rng, stages, ranks, count)
    x, y = torch.randn(count + 3, 4), torch.randn(count + 3, 4)
    plan = PipePlan(schedule=schedule, num_microbatches=count)
    engine = PipeEngine(graph, None, plan, functional.mse_loss, act_out=ranks)
    loss, _ = engine(x, target=y)
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        made: list[tuple[Tensor, Tensor]] = []
        for stage, module in zip(graph.stages, twins, strict=True):
            values = [a if port.source == "batch" else made[int(port.key)][port.index] for port in stage.inputs]
            made.append(module(*values))
        part = functional.mse_loss(made[-1][0], b) * (len(a) / len(x))
        part.backward()
        total = total + part.detach()
    assert torch.equal(loss, total)
    for stage, module in zip(graph.stages, twins, strict=True):
        for mine, theirs in zip(stage.module.parameters(), module.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                assert torch.equal(mine.grad, theirs.grad)
