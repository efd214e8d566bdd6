"""Parameters of several stages: sums per micro-batch, sums per step, and when they can be made."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.order import one_device
from vescale_pipe._runtime.rank import tied_groups
from vescale_pipe._runtime.tied import TiedGroup, settle_points
from vescale_pipe._schedules import build_schedule
from vescale_pipe._split import split


class Shared(nn.Module):
    """One matrix in stages 0, 2 and 3; in stage 2 under a hook-free second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].weight = self.layers[0].weight
        self.layers[2].bias = self.layers[1].bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


AT = ["layers.1", "layers.2", "layers.3"]
X = torch.randn(7, 4)


def step(plan: PipePlan, model: nn.Module, mesh: object = None, ranks: int | None = 4) -> PipeEngine:
    return PipeEngine(model, mesh, plan, functional.mse_loss, example=((X[:2],), {}), act_out=ranks)


def loop(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
    for a, b in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        (functional.mse_loss(model(a), b) * (len(a) / len(x))).backward()


def test_groups_are_found() -> None:
    graph = split(Shared(), at=AT, example_args=(X[:2],))
    groups = sorted(tied_groups(graph, [0, 1, 2, 0]), key=lambda one: len(one.members))
    assert [[stage for stage, _ in one.members] for one in groups] == [[2, 1], [3, 2, 0]]
    assert [one.ranks for one in groups] == [(2, 1), (0, 2, 0)]
    assert [one.owner for one in groups] == [1, 0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_exact_sums_have_the_bits_of_one_device(schedule: str) -> None:
    model = Shared()
    twin = copy.deepcopy(model)
    engine = step(PipePlan(schedule=schedule, num_microbatches=5, at=AT), model)
    for _ in range(2):  # the second adds to the gradients of the first
        x, y = torch.randn(7, 4), torch.randn(7, 4)
        engine(x, target=y)
        loop(twin, x, y, 5)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("tied", ["exact", "fast"])
def test_copies_on_other_ranks_stay_equal(rank: int, tied: str) -> None:
    torch.manual_seed(0)
    model = Shared()
    twin = copy.deepcopy(model)
    plan = PipePlan(schedule="1f1b", num_microbatches=3, at=AT, tied=tied, timeout=20)
    engine = step(plan, model, dist.group.WORLD, None)
    names = dict(twin.named_parameters(remove_duplicate=False))
    steps = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (engine, twin)]
    for _ in range(3):
        for _ in range(2):
            x, y = torch.randn(7, 4), torch.randn(7, 4)
            engine(x, target=y)
            loop(twin, x, y, 3)
        same: Callable[[Tensor, Tensor], object] = torch.equal
        for name, mine in engine.named_parameters():
            if tied == "exact":
                assert same(mine.grad, names[name].grad), name
            torch.testing.assert_close(mine.grad, names[name].grad)
        for one in steps:
            one.step()
            one.zero_grad()
    if rank != 1:
        weight = next(p for n, p in engine.named_parameters() if n.endswith("weight")).detach().clone()
        other = [torch.empty_like(weight) for _ in range(4)]
    else:
        weight, other = torch.zeros(4, 4), [torch.empty(4, 4) for _ in range(4)]
    dist.all_gather(other, weight)
    assert torch.equal(other[0], other[2])
    assert torch.equal(other[0], other[3])
    engine.close()


def test_fast_sums_differ_in_last_bits_only() -> None:
    model = Shared()
    twin = copy.deepcopy(model)
    engine = step(PipePlan(schedule="1f1b", num_microbatches=5, at=AT, tied="fast"), model)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    engine(x, target=y)
    loop(twin, x, y, 5)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_sum_is_made_as_soon_as_nothing_can_wait_for_it() -> None:
    """In 1F1B the backward of the first stage comes last, so right after it; where W is late, later."""
    group = TiedGroup(0, ((1, "w"), (0, "w")), (1, 0))
    schedule = build_schedule("1f1b", 2, 4)
    (points,) = settle_points(schedule, [(0, 1)], [(0, 1)], [group], 0)
    actions = schedule.actions(0)
    for microbatch, point in enumerate(points):
        done = [str(one) for one in actions[:point]]
        assert f"0B{microbatch}" in done
        assert f"0B{microbatch + 1}" not in done
    schedule = build_schedule("zb_h2", 4, 8)
    edges = [(0, 1), (1, 2), (2, 3)]
    (points,) = settle_points(schedule, edges, edges, [TiedGroup(0, ((3, "w"), (0, "w")), (3, 0))], 0)
    assert points == sorted(points)
    for microbatch, point in enumerate(points):
        done = [str(one) for one in schedule.actions(0)[:point]]
        assert f"0W{microbatch}" in done
    (points,) = settle_points(one_device(2, 2), [(0, 1)], [(0, 1)], [TiedGroup(0, ((1, "w"), (0, "w")), (0, 0))], 0)
    assert points == [4, 8]
