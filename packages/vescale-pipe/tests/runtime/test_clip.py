"""The norm of all gradients, against torch on one device, bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._split import manual
from vescale_pipe.errors import PipeError, RankError


class Tied(nn.Module):
    """One weight at both ends, under two names; one parameter without a gradient; two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.unused = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[2].bfloat16()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return self.head(x.float())


AT = ["blocks.1", "blocks.2", "blocks.3"]


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, -2), target.flatten())


def steps(mesh: Any, ranks: int, schedule: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=3, at=AT, timeout=20, **options)
    example = ((torch.zeros(2, 5, dtype=torch.int64),), {})
    engine = PipeEngine(model, mesh, plan, cross_entropy, example=example, act_out=None if mesh else ranks)
    names = dict(reference.named_parameters(remove_duplicate=False))
    for max_norm, norm_type in ((0.1, 2.0), (1e9, 2.0), (0.5, 1.0), (0.01, math.inf)):
        x, y = torch.randint(0, 11, (7, 5)), torch.randint(0, 11, (7, 5))
        engine(x, target=y)
        for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            (cross_entropy(reference(a), b) * (len(a) / 7)).backward()
        total = engine.clip_grad_norm_(max_norm, norm_type)
        assert torch.equal(total, nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type))
        for name, mine in engine.named_parameters():
            want = names[name].grad
            assert (mine.grad is None) == (want is None), name
            assert want is None or torch.equal(mine.grad, want), name
    engine.close()


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb_v", 2)])
def test_acted_out(schedule: str, ranks: int) -> None:
    steps(None, ranks, schedule)


@pytest.mark.ranks(4, timeout=60)
def test_four_ranks() -> None:
    steps(dist.group.WORLD, 4, "1f1b")


@pytest.mark.ranks(2, timeout=60)
def test_two_ranks_that_freed_what_is_not_theirs() -> None:
    steps(dist.group.WORLD, 2, "zb_v", release=True)


def test_stages_by_hand_and_no_gradients() -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    engine = PipeEngine(manual(stages), None, PipePlan(num_microbatches=1), functional.mse_loss, act_out=2)
    assert float(engine.clip_grad_norm_(1.0)) == 0.0
    engine(torch.ones(2, 2), target=torch.zeros(2, 2))
    twin = nn.Sequential(*copy.deepcopy(stages))
    for mine, theirs in zip(twin.parameters(), engine.parameters(), strict=True):
        mine.grad = theirs.grad.clone()
    assert torch.equal(engine.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
    for mine, theirs in zip(twin.parameters(), engine.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_what_is_not_finite_is_told_and_nothing_is_changed() -> None:
    engine = PipeEngine([nn.Linear(2, 2)], None, PipePlan(num_microbatches=1), functional.mse_loss)
    engine(torch.full((1, 2), math.inf), target=torch.zeros(1, 2))
    with pytest.raises(PipeError, match="the norm of all gradients is nan"):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    engine.zero_grad()
    engine(torch.ones(1, 2), target=torch.zeros(1, 2))
    assert engine.clip_grad_norm_(1.0, error_if_nonfinite=True).isfinite()


@pytest.mark.ranks(4, timeout=60)
def test_gradients_that_are_cut_over_another_dimension(rank: int) -> None:
    """Two ranks hold the halves of each gradient of a stage: the user says how to make one norm of them."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    engine = PipeEngine(manual(stages), mesh, PipePlan(num_microbatches=1, timeout=20), functional.mse_loss)
    whole = [torch.randn(4, 4), torch.randn(4, 4)]
    part = slice(0, 2) if mesh.get_local_rank("shard") == 0 else slice(2, 4)
    (mine,) = engine.parameters()
    mine.grad = torch.zeros(4, 4)
    mine.grad[part] = whole[engine.stages[0]][part]
    seen = []

    def norm_of(name: str, parameter: nn.Parameter) -> Tensor:
        seen.append(name)
        square = parameter.grad.square().sum()
        dist.all_reduce(square, group=mesh.get_group("shard"))
        return square.sqrt()

    total = engine.clip_grad_norm_(0.5, norm_of=norm_of)
    assert seen == ["weight"]
    torch.testing.assert_close(total, torch.cat(whole).norm())
    torch.testing.assert_close(mine.grad[part], whole[engine.stages[0]][part] * 0.5 / total)
    engine.close()


@pytest.mark.ranks(4, timeout=60)
def test_dtensors_count_as_a_whole() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    whole = [torch.randn(4, 4), torch.randn(4, 4)]
    for stage, grad in zip(stages, whole, strict=True):
        stage.weight = nn.Parameter(distribute_tensor(stage.weight.detach(), mesh["tp"], [Shard(0)]))
        stage.weight.grad = distribute_tensor(grad, mesh["tp"], [Shard(0)])
    engine = PipeEngine(manual(stages), mesh, PipePlan(num_microbatches=1, timeout=20), functional.mse_loss)
    total = engine.clip_grad_norm_(0.5)
    torch.testing.assert_close(total, torch.cat(whole).norm())
    (mine,) = engine.parameters()
    torch.testing.assert_close(mine.grad.full_tensor(), whole[engine.stages[0]] * 0.5 / total)
    engine.close()


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_fails_in_it_is_named(rank: int) -> None:
    engine = PipeEngine(manual([nn.Linear(2, 2), nn.Linear(2, 2)]), dist.group.WORLD, PipePlan(num_microbatches=1))
    for parameter in engine.parameters():
        parameter.grad = torch.ones_like(parameter)

    def bad(name: str, parameter: nn.Parameter) -> Tensor:
        raise ValueError(f"no norm of {name}")

    with pytest.raises((ValueError, RankError), match=r"no norm of weight") as caught:
        engine.clip_grad_norm_(1.0, norm_of=bad if rank else None)
    if rank == 0:
        assert str(caught.value).startswith("rank 1 failed at clip_grad_norm_: ValueError: no norm of weight\n")
