"""Schedules put into the order that keeps sums bitwise."""

import copy

import pytest
import torch
from torch import nn

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.order import fit, in_order, one_device
from vescale_pipe._schedule import Action, Kind, Schedule
from vescale_pipe._schedule.check import problems, validate
from vescale_pipe._schedules import build_schedule
from vescale_pipe._split import Port, Stage, StageGraph
from vescale_pipe._split.tree import Slot
from vescale_pipe.errors import ScheduleError

F, B, I, W = Kind  # noqa: E741 -- the letters that papers use


def gpipe_backwards() -> Schedule:
    """Backwards from the last micro-batch to the first."""
    ranks = [[Action(F, rank, m) for m in range(3)] + [Action(B, rank, m) for m in (2, 1, 0)] for rank in range(2)]
    return Schedule.of("backwards", [0, 1], 3, ranks)


def test_one_device_is_valid_and_canonical() -> None:
    validate(one_device(3, 4), canonical=True)


def test_backwards_are_renumbered() -> None:
    found = in_order(gpipe_backwards())
    validate(found, canonical=True)
    assert [str(one) for one in found.actions(1)] == ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe_v"])
def test_what_is_in_order_stays_as_it_is(name: str) -> None:
    schedule = build_schedule(name, 4, 9)
    assert in_order(schedule) is schedule


def test_both_halves_are_renumbered_apart() -> None:
    ranks = [[Action(F, 0, 0), Action(F, 0, 1), Action(I, 0, 1), Action(I, 0, 0), Action(W, 0, 1), Action(W, 0, 0)]]
    found = in_order(Schedule.of("halves", [0], 2, ranks, [(0, 1)]))
    assert [str(one) for one in found.actions(0)] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]
    assert found.joined(0) == (1,)


def branches() -> StageGraph:
    """Stage 0 gives one value to 1 and 2, which are side by side; 3 takes theirs."""
    ports = [[("batch", 0, 0)], [("stage", 0, 0)], [("stage", 0, 0)], [("stage", 1, 0), ("stage", 2, 0)]]
    return StageGraph(
        tuple(
            Stage(index, nn.Identity(), tuple(Port(*one) for one in row), 1, (True,)) for index, row in enumerate(ports)
        ),
        (),
    )


def test_stages_side_by_side_may_run_in_any_order() -> None:
    """A schedule that runs stage 2 before stage 1 cannot pass values on from 1 to 2: they go directly."""
    numbers = [0, 2, 1, 3]
    actions = [Action(F, stage, 0) for stage in numbers] + [Action(B, stage, 0) for stage in reversed(numbers)]
    schedule = Schedule.of("sideways", [0, 0, 0, 0], 1, [actions])
    _, (wiring,) = fit(schedule, [branches()])
    assert not wiring.relayed
    assert (1, 2) not in wiring.edges
    assert not problems(schedule, edges=wiring.edges, grad_edges=wiring.grad_edges)
    _, (wiring,) = fit(one_device(4, 1), [branches()])
    assert wiring.relayed
    assert (1, 2) in wiring.edges


def test_stages_must_be_as_many() -> None:
    with pytest.raises(
        ScheduleError, match="'one device' has 3 stages, 3 on each of 1 rank, and the model 4: cut the model into 3"
    ):
        fit(one_device(3, 1), [branches()])


def test_gradients_of_stages_side_by_side_are_added_latest_first() -> None:
    """One value, three stages, in an order in which it cannot be passed on: the bits are still those of one device."""

    class Piece(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.lin = nn.Linear(width, 8)

        def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.tanh(self.lin(torch.cat(values, 1))),)

    ports = [[("batch", 0, 0)], *([[("stage", 0, 0)]] * 3), [("stage", index, 0) for index in (1, 2, 3)]]
    pieces = [Piece(8 * len(row)) for row in ports]
    made = [Stage(n, pieces[n], tuple(Port(*one) for one in row), 1, (True,)) for n, row in enumerate(ports)]
    numbers = [0, 3, 2, 1, 4]
    actions = [Action(F, stage, 0) for stage in numbers] + [Action(B, stage, 0) for stage in reversed(numbers)]
    plan = PipePlan(schedule=Schedule.of("sideways", [0] * 5, 1, [actions]), num_microbatches=1)
    twins = copy.deepcopy(pieces)
    engine = PipeEngine(StageGraph(tuple(made), (), template=Slot(0)), None, plan, nn.functional.mse_loss, act_out=1)
    for _ in range(5):
        x, y = torch.randn(6, 8), torch.randn(6, 8)
        engine.zero_grad()
        engine(x, target=y)
        first = twins[0](x)
        last = twins[4](*(twins[number](*first)[0] for number in (1, 2, 3)))
        twins[0].zero_grad()
        nn.functional.mse_loss(last[0], y).backward()
        assert torch.equal(pieces[0].lin.weight.grad, twins[0].lin.weight.grad)
