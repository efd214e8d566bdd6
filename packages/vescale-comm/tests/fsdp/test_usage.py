"""Ranks may use different modules, in different orders, as often as they like: gradients are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vescale_comm._fsdp import fully_shard, no_sync
from vescale_comm._plan import Rows
from vescale_comm.emulator import emulate

Path = Sequence[int]
"""Which experts a rank uses, in order."""


class Routed(nn.Module):
    """Uses the experts that the caller names, in that order; has a parameter of its own, and a frozen one."""

    def __init__(self, experts: int = 4, width: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.full((width,), 0.25), requires_grad=False)

    def forward(self, x: Tensor, path: Path, scaled: bool = True) -> Tensor:
        x = self.enter(x)
        for number in path:
            x = x + self.experts[number](x) + self.shift
        return x * self.scale if scaled else x


def make(experts: int = 4) -> Routed:
    torch.manual_seed(3)
    return Routed(experts).double()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(2, 2, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def expected(model: nn.Module, paths: Sequence[Path], step: int = 0) -> list[Tensor | None]:
    """Return the mean of the gradients of all ranks, on one device."""
    model.zero_grad()
    loss = sum(model(inputs(rank, step), path).square().sum() for rank, path in enumerate(paths)) / len(paths)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def check_gradients(model: nn.Module, wanted: Sequence[Tensor | None]) -> None:
    """Compare the own shards of gradients with whole ones; a gradient that one device lacks must be lacking."""
    for (name, parameter), whole in zip(model.named_parameters(), wanted, strict=True):
        info = parameter.vescale
        if whole is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            own = whole.reshape(-1)[info.start : info.stop]
            torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-12, msg=name)


def run(world: int, steps: Sequence[Sequence[Path]], **options: object) -> None:
    """Let ranks follow their paths, step by step, with weights that change in between."""

    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make(), **options)
        for step, paths in enumerate(steps):
            model.zero_grad()
            model(inputs(rank, step), paths[rank]).square().sum().backward()
            wanted = expected(reference, paths, step)
            check_gradients(model, wanted)
            for one in (model, reference):
                torch.optim.SGD(one.parameters(), lr=0.1).step()

    emulate(on_rank, world, "canonical")


def test_a_unit_that_only_one_rank_uses() -> None:
    # With FSDP2 of torch the ranks wait for each other for good.
    run(2, [[(0, 1, 2, 3), (0, 3)], [(0, 1), (2, 3)], [(3,), (0, 1, 2)]])


def test_units_that_nobody_uses_have_no_gradient() -> None:
    run(2, [[(0,), (0,)], [(0, 2), (0, 2)], [(), ()], [(1,), (1,)]])


def test_orders_that_differ_between_ranks() -> None:
    run(3, [[(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]] * 3)


def test_a_unit_that_is_used_several_times() -> None:
    run(2, [[(0, 1, 0), (0, 1, 0)]] * 3)
    run(2, [[(0, 0, 0), (0, 0, 0)], [(1, 0, 1), (1, 0, 1)], [(0, 1, 0, 1), (0, 1)]])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_prefetch_and_reshard(prefetch: int, reshard: bool) -> None:
    paths = [[(0, 1, 2, 3), (0, 2)], [(1,), (3, 2, 1)], [(), (2,)]]
    run(2, paths, prefetch=prefetch, reshard_after_forward=reshard)


def test_several_forwards_before_a_backward() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        for _ in range(2):
            model.zero_grad()
            first, second = (model(inputs(rank, step), path) for step, path in enumerate([(0, 1), (1, 2, 3)]))
            (first * second).sum().backward()
            reference.zero_grad()
            for other in range(2):
                one, two = (reference(inputs(other, step), path) for step, path in enumerate([(0, 1), (1, 2, 3)]))
                ((one * two).sum() / 2).backward()
            check_gradients(model, [parameter.grad for parameter in reference.parameters()])

    emulate(on_rank, 2, "canonical")


def test_a_backward_that_runs_twice() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        loss = model(inputs(rank, 0), (0, 1, 2)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        wanted = expected(reference, [(0, 1, 2)] * 2)
        check_gradients(model, [None if gradient is None else 2 * gradient for gradient in wanted])

    emulate(on_rank, 2, "canonical")


def test_a_backward_through_a_backward() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x, (0, 1, 2)).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        for _ in range(2):
            model.zero_grad()
            penalty(model, inputs(rank, 0)).backward()
            reference.zero_grad()
            (sum(penalty(reference, inputs(other, 0)) for other in range(2)) / 2).backward()
            check_gradients(model, [parameter.grad for parameter in reference.parameters()])

    emulate(on_rank, 2, "canonical")


def test_evaluation_between_steps() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        for step in range(3):
            with torch.no_grad() if step != 1 else torch.inference_mode():
                got = model(inputs(rank, step), (0, 2))
            torch.testing.assert_close(got.clone(), reference(inputs(rank, step), (0, 2)).detach(), rtol=0, atol=1e-12)
            # Without a word that nothing is to be recorded, and with no backward.
            assert model(inputs(rank, step), (1, 3)).shape == (2, 3)
            model.zero_grad()
            model(inputs(rank, step), (0, 1)).square().sum().backward()
            wanted = expected(reference, [(0, 1)] * 2, step)
            check_gradients(model, wanted)
            for one in (model, reference):
                torch.optim.SGD(one.parameters(), lr=0.1).step()

    emulate(on_rank, 2, "canonical")


def test_freezing_and_thawing_later() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        changes = [("experts.1.0.weight", False), ("shift", True), ("experts.1", False), ("experts.1", True)]
        for prefix, wanted in changes:
            for one in (model, reference):
                one.zero_grad()
                for name, parameter in one.named_parameters():
                    if name.startswith(prefix):
                        parameter.requires_grad_(wanted)
            model(inputs(rank, 0), (0, 1, 2)).square().sum().backward()
            check_gradients(model, expected(reference, [(0, 1, 2)] * 2))

    emulate(on_rank, 2, "canonical")


def test_a_submodule_that_is_called_by_itself() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make(), units=["experts.0", "experts.1", "enter"])
        x = torch.ones(2, 3, dtype=torch.float64) * (rank + 1)
        model.experts[1](x).square().sum().backward()
        for other in (1.0, 2.0):
            (reference.experts[1](torch.ones(2, 3, dtype=torch.float64) * other).square().sum() / 2).backward()
        check_gradients(model, [parameter.grad for parameter in reference.parameters()])

    emulate(on_rank, 2, "canonical")


paths = st.lists(st.integers(0, 3), max_size=5).map(tuple)


@settings(max_examples=20, deadline=None)
@given(
    steps=st.integers(1, 3).flatmap(lambda world: st.lists(st.tuples(*[paths] * world), min_size=1, max_size=3)),
    repeats=st.booleans(),
    prefetch=st.integers(0, 2),
    reshard=st.booleans(),
    units=st.sampled_from(["auto", ["experts.1"], [nn.Linear], []]),
    rows=st.sampled_from([1, Rows(1), {r"experts.*weight": Rows(2)}]),
)
def test_any_usage(
    steps: list[tuple[Path, ...]], repeats: bool, prefetch: int, reshard: bool, units: object, rows: object
) -> None:
    if not repeats:
        steps = [tuple(tuple(dict.fromkeys(path)) for path in paths) for paths in steps]
    else:  # whoever uses a unit again after others: all ranks do
        steps = [(paths[0],) * len(paths) for paths in steps]
    run(len(steps[0]), steps, prefetch=prefetch, reshard_after_forward=reshard, units=units, granularity=rows)


def test_accumulation_over_micro_batches_that_use_different_units() -> None:
    # In torch DDP a parameter that only a micro-batch without synchronization used was once never reduced.
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        micro = [[(0,), (1, 2)], [(2, 3), ()], [(1,), (1,)]]
        for _ in range(2):
            model.zero_grad()
            total: list[Tensor | None] = [None] * len(list(model.parameters()))
            for step, paths in enumerate(micro):
                wanted = copy.deepcopy(expected(reference, paths, step))
                total = [b if a is None else a if b is None else a + b for a, b in zip(total, wanted, strict=True)]
                loss = model(inputs(rank, step), paths[rank]).square().sum()
                if step < 2:
                    with no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
            check_gradients(model, total)

    emulate(on_rank, 2, "canonical")
