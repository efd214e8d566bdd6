"""Gradients are reduced by one thing only: a second one is refused, in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_comm as vc


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def optimizer(model: nn.Module) -> Any:
    return vc.DistributedOptimizer(model, torch.optim.SGD)


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "replicate": vc.replicate,
    "DistributedDataParallel": vc.DistributedDataParallel,
    "DistributedOptimizer": optimizer,
    "fully_shard": vc.fully_shard,
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", CALLS)
def test_a_second_one_on_the_same_parameters_is_refused(first: str, second: str) -> None:
    model = net()
    kept = CALLS[first](model)
    before = list(model.parameters())
    with pytest.raises(vc.CommError, match=r"already"):
        CALLS[second](model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    del kept


@pytest.mark.parametrize("second", CALLS)
def test_wrappers_are_seen_through(second: str) -> None:
    text = f"{second} does that itself: pass the plain module"
    for wrapped in (nn.parallel.DistributedDataParallel(net()), vc.DistributedDataParallel(net())):
        for given in (wrapped, nn.ModuleDict({"inside": wrapped})):
            with pytest.raises(ValueError, match=f"DistributedDataParallel reduces gradients already. {text}"):
                CALLS[second](given)


def test_an_inner_module_and_bare_parameters_count() -> None:
    model = vc.replicate(net())
    for call in (vc.replicate, vc.fully_shard):
        with pytest.raises(ValueError, match=r"weight: a replica \(of replicate or .* reduces its gradients already"):
            call(model[0])
    with pytest.raises(ValueError, match=r"a replica"):
        optimizer(model[1].parameters())  # type: ignore[arg-type]


def test_what_lets_go_is_followed_by_another() -> None:
    model = net()
    vc.replicate(model)
    vc.replicated(model).close()
    vc.fully_shard(model)
    other = net()
    wrapper = vc.DistributedDataParallel(other)
    wrapper.close()
    made = optimizer(other)
    made.close()
    vc.replicate(other)


def test_parts_may_have_different_owners() -> None:
    model = net()
    vc.fully_shard(model[0])
    vc.replicate(model, groups={r"0\..*": None})
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
