"""Dropout under a seed: the numbers of one process, wherever the model is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.draws import Stream, microbatch_seed
from vescale_pipe.errors import PipeError

mse = functional.mse_loss


class Noisy(nn.Module):
    """Draws within blocks, between them, and in one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 2:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = functional.dropout(block(x), 0.2, self.training)
        return x


class Branches(nn.Module):
    """Two stages side by side: nothing but the stream goes from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.cat((self.left(x), self.right(y)), 1))


def loop(model: nn.Module, step: int, args: tuple[Tensor, ...], target: Tensor, count: int, seed: int = 7) -> Tensor:
    """The plain script: one process, seeded before each micro-batch."""
    total = torch.zeros(())
    cut = [one.tensor_split(count) for one in args]
    for m, y in enumerate(target.tensor_split(count)):
        torch.manual_seed(microbatch_seed(seed, step, m))
        part = mse(model(*(one[m] for one in cut)), y) * (len(y) / len(target))
        part.backward()
        total = total + part.detach()
    return total


def compare(engine: PipeEngine, model: nn.Module, reference: nn.Module, inputs: int, steps: int = 3) -> None:
    names = dict(reference.named_parameters())
    for step in range(steps):
        args = tuple(torch.randn(7, 8, generator=torch.Generator().manual_seed(step + i)) for i in range(inputs))
        target = args[0] * 2
        before = torch.get_rng_state()
        loss, _ = engine(*args, target=target)
        assert torch.equal(torch.get_rng_state(), before)  # the user's own stream goes on as if nothing was drawn
        assert torch.equal(loss, loop(reference, step, args, target, 3))
        for name, mine in engine.named_parameters():
            assert torch.equal(mine.grad, names[name].grad), name
    assert engine.steps == steps


@pytest.mark.parametrize(
    ("schedule", "ranks", "at"),
    [
        ("1f1b", 2, ["blocks.2"]),
        ("1f1b", 4, ["blocks.1", "blocks.2", "blocks.3"]),
        ("zb_h1", 3, ["blocks.2", "blocks.3"]),
        ("zb_v", 2, ["blocks.1", "blocks.2", "blocks.3"]),
        ("interleaved_1f1b", 2, ["blocks.1", "blocks.2", "blocks.3"]),
        ("looped_bfs", 2, ["blocks.1", "blocks.2", "blocks.3"]),
    ],
)
def test_masks_are_those_of_one_process(schedule: str, ranks: int, at: list[str]) -> None:
    torch.manual_seed(0)
    model = Noisy()
    reference = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=3, at=at, seed=7)
    compare(PipeEngine(model, None, plan, mse, act_out=ranks), model, reference, 1)


def test_one_process_without_ranks_has_them_too() -> None:
    torch.manual_seed(0)
    for at in (None, ["blocks.3"]):
        model = Noisy()
        reference = copy.deepcopy(model)
        compare(PipeEngine(model, None, PipePlan(num_microbatches=3, at=at, seed=7), mse), model, reference, 1)


def test_stages_side_by_side_draw_one_after_the_other() -> None:
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    plan = PipePlan(num_microbatches=3, at=["right", "last"], seed=7)
    compare(PipeEngine(model, None, plan, mse, act_out=3), model, reference, 2)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_real_ranks_need_not_be_seeded_alike(rank: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = Noisy()
    reference = copy.deepcopy(model)
    at = ["blocks.2"] if schedule == "1f1b" else ["blocks.1", "blocks.2", "blocks.3"]
    plan = PipePlan(schedule=schedule, num_microbatches=3, at=at, seed=7, timeout=20)
    engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=((torch.zeros(2, 8),), {}))
    torch.manual_seed(rank)
    compare(engine, model, reference, 1)
    engine.close()


def test_evaluation_and_a_run_that_goes_on() -> None:
    torch.manual_seed(0)
    model = Noisy()
    plan = PipePlan(num_microbatches=3, at=["blocks.2"], seed=7)
    x = torch.randn(7, 8)
    first = PipeEngine(model, None, plan, mse, act_out=2)
    losses = [first(x, target=x)[0] for _ in range(3)]
    assert len({float(one) for one in losses}) == 3
    second = PipeEngine(model, None, plan, mse, act_out=2)
    second.eval_step(x, target=x)  # counts as no step
    second.steps = 2
    assert torch.equal(second(x, target=x)[0], losses[2])


def test_without_a_seed_nothing_is_touched() -> None:
    model = Noisy()
    engine = PipeEngine(model, None, PipePlan(num_microbatches=1), mse)
    reference = copy.deepcopy(model)
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    loss, _ = engine(x, target=x)
    torch.manual_seed(3)
    assert torch.equal(loss, mse(reference(x), x).detach())
    with pytest.raises(PipeError, match="seed='x': it must be a whole number"):
        PipePlan(num_microbatches=1, seed="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40, 2**64 - 1])
def test_seeds_differ_in_the_bits_that_torch_uses(seed: int) -> None:
    found = {microbatch_seed(seed, step, m) for step in range(0, 100000, 997) for m in (0, 1, 7, 4095)}
    assert len({one & 0xFFFFFFFF for one in found}) == 101 * 4
    for one in list(found)[:5]:
        torch.manual_seed(one)
    assert not found & {microbatch_seed(seed + 1, step, m) for step in range(9) for m in range(9)}


def test_a_stream_goes_on_where_another_ended_also_after_an_error() -> None:
    torch.manual_seed(5)
    want = torch.rand(6)
    state = torch.get_rng_state()
    with Stream(5) as first:
        head: Any = torch.rand(2)
    with Stream(first.end) as second:
        tail = torch.rand(4)
    assert torch.equal(torch.cat((head, tail)), want)
    assert torch.equal(torch.get_rng_state(), state)

    def fails() -> None:
        with Stream(second.end):
            torch.rand(1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert torch.equal(torch.get_rng_state(), state)
