"""What ends a step: ranks that raise, plans that differ, schedules that do not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._schedule import Action, Kind, Schedule, from_csv
from vescale_pipe._split import manual
from vescale_pipe.errors import PipeError, RankError, ScheduleError, SplitError, TransportError

mse = functional.mse_loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


EXAMPLE = (torch.zeros(2, 8),), {}


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_raises_ends_all_with_its_traceback(rank: int, bad: int, when: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    plan = PipePlan(num_microbatches=4, at=["1", "2"], timeout=500)  # longer than the test may take
    engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    engine(x, target=y)
    if rank == bad:
        calls = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("the third one is bad")

        if when == "forward":
            model[rank].register_forward_pre_hook(fail)
        else:
            model[rank].down.weight.register_hook(fail)

    def steps() -> None:
        engine(x, target=y)
        # A rank whose part was over before may only learn it in the next step.
        engine(x, target=y)

    with pytest.raises((RankError, ValueError)) as caught:
        steps()
    text = str(caught.value)
    assert "the third one is bad" in text
    if rank != bad:
        assert isinstance(caught.value, RankError)
        where = f"{bad}{'F2' if when == 'forward' else 'B2'}"
        assert text.partition("\n")[0] == f"rank {bad} failed at {where}: ValueError: the third one is bad"
        assert caught.value.rank == bad
        assert caught.value.__cause__ is None  # what gloo says about it is no news
        assert "Traceback" in text
    with pytest.raises(PipeError, match="make a new engine on all ranks"):
        engine(x, target=y)


@pytest.mark.ranks(2, timeout=60)
def test_ranks_with_different_plans_are_told(rank: int) -> None:
    model = nn.Sequential(Block(), Block())
    plan = PipePlan(num_microbatches=2 + rank, at=["1"], timeout=20)
    with pytest.raises(PipeError, match=r"(?s)micro-batches: (2 here, 3|3 here, 2) on rank"):
        PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    model = nn.Sequential(Block(), Block())
    with pytest.raises(ScheduleError, match="'1f1b' has 4 stages, 1 on each of 4 ranks, and the model 2: cut"):
        PipeEngine(
            model, None, PipePlan(num_microbatches=2, schedule="1f1b", at=["1"]), mse, example=EXAMPLE, act_out=4
        )
    own = Schedule.of("own", [0, 1], 1, [[Action(Kind.F, 0, 0)], [Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)]])
    with pytest.raises(ScheduleError):
        PipeEngine(model, None, PipePlan(num_microbatches=1, schedule=own, at=["1"]), mse, example=EXAMPLE, act_out=2)
    with pytest.raises(PipeError, match="is for 2 ranks; the pipeline has 3"):
        PipeEngine(model, None, PipePlan(num_microbatches=1, schedule=own, at=["1"]), mse, example=EXAMPLE, act_out=3)
    with pytest.raises(PipeError, match="is not cut yet"):
        list(PipeEngine(model, None, PipePlan(num_microbatches=1), mse, act_out=2).parameters())


def test_a_failed_step_leaves_an_acted_out_pipeline_usable() -> None:
    model = nn.Sequential(Block(), Block())
    engine = PipeEngine(model, None, PipePlan(num_microbatches=2, at=["1"]), mse, example=EXAMPLE, act_out=2)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(PipeError, match="1 rows cannot make 2 micro-batches"):
        engine(x[:1], target=y[:1])
    handle = model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(x, target=y)
    handle.remove()
    engine.zero_grad()
    reference = copy.deepcopy(model)
    engine(x, target=y)
    for one, want in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
        (mse(reference(one), want) * 0.5).backward()
    for mine, theirs in zip(engine.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_is_gone_or_stuck_is_named_with_the_message(rank: int) -> None:
    for gone in (True, False):
        model = nn.Sequential(Block(), Block())
        plan = PipePlan(num_microbatches=2, at=["1"], timeout=500 if gone else 0.3)
        engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        if rank == 1:
            if gone:
                engine._transports[0].close()  # as when a process ends: nothing is said
            else:
                dist.barrier()
            continue
        text = "was lost, for rank 1 is gone" if gone else r"within 0.3 s \(timeout=\); rank 1 is stuck"
        what = "the gradients of stage 1 for stage 0, micro-batch 0"
        if gone:  # what is on its way to the rank is lost too, and either may be noticed first
            what = rf"({what}|the values of stage 0 for stage 1, micro-batch [01])"
        with pytest.raises(TransportError, match=rf"{what} .*{text}"):
            engine(x, target=y)
        if not gone:
            dist.barrier()


def test_a_target_of_other_rows_is_refused():
    engine = PipeEngine(nn.Linear(4, 4), None, PipePlan(num_microbatches=2), nn.functional.mse_loss)
    with pytest.raises(PipeError, match=r"target: a tensor of shape \(2, 4\) given; the batch has 8 rows"):
        engine(torch.ones(8, 4), target=torch.ones(2, 4))


def test_a_schedule_in_another_order_is_told(caplog):
    own = from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", "own")
    engine = PipeEngine(
        manual([nn.Linear(4, 4), nn.Linear(4, 4)]),
        None,
        PipePlan(schedule=own, num_microbatches=2),
        nn.functional.mse_loss,
        act_out=2,
    )
    engine(torch.ones(4, 4), target=torch.ones(4, 4))
    assert "schedule 'own' adds gradients in another order" in caplog.text


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_fails_before_its_step_begins_tells_the_others_why(rank: int, bad: int) -> None:
    """Others may ask for messages of a rank that is gone already: what they show is its error, not gloo's."""
    model = nn.Sequential(Block(), Block(), Block())
    plan = PipePlan(num_microbatches=4, at=["1", "2"], timeout=500)
    engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
    x = torch.randn(8, 8)
    engine(x, target=x)
    if rank == bad:
        with pytest.raises(PipeError, match=r"^batch: 1 rows cannot make 4 micro-batches"):
            engine(x[:1], target=x[:1])
        return
    with pytest.raises(RankError) as caught:
        engine(x, target=x)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        f"rank {bad} failed at the start of a step: vescale_pipe.errors.PipeError: batch: 1 rows"
    )
    assert lines[1].startswith(f"(rank {rank} waited for ")


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_make_its_engine_tells_the_others_why(rank: int, bad: int) -> None:
    model = nn.Sequential(Block(), Block())
    plan = PipePlan(num_microbatches=4, at=["1" if rank != bad else "7"], timeout=500)
    if rank == bad:
        with pytest.raises(SplitError, match=r"at=.7.: Sequential has no such module"):
            PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
        return
    with pytest.raises(RankError, match=rf"^rank {bad} failed at the making of the engine: \S+SplitError: at='7'"):
        PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
