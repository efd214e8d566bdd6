"""One name for accumulation, whatever reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_comm as vc

STRATEGIES = {
    "replicate": lambda model: (vc.replicate(model), model),
    "wrapper": lambda model: (vc.DistributedDataParallel(model),) * 2,
    "optimizer": lambda model: (vc.DistributedOptimizer(model, torch.optim.SGD, lr=0.5), model),
    "shards": lambda model: (vc.fully_shard(model), model),
}


@pytest.mark.ranks(2)
def test_two_backwards_are_one_reduction(rank: int) -> None:
    for name, make in STRATEGIES.items():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        want = [param.detach().clone() for param in model.parameters()]
        reference = nn.Linear(3, 2)
        reference.load_state_dict(model.state_dict())
        kept, model = make(model)
        optimizer = kept if name == "optimizer" else torch.optim.SGD(model.parameters(), lr=0.5)
        batches = torch.arange(24.0).view(4, 2, 3) / 24
        with vc.no_sync(kept):
            model(batches[2 * rank]).square().sum().backward()
        model(batches[2 * rank + 1]).square().sum().backward()
        optimizer.step()
        (sum(reference(batch).square().sum() for batch in batches) / 2).backward()
        with vc.full_parameters(model) if name == "shards" else torch.no_grad():
            for before, mine, theirs in zip(want, model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine, before - 0.5 * theirs.grad), name


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_reduces_nothing_is_refused(alone: None) -> None:
    with pytest.raises(vc.CommError, match="Linear was given neither to replicate nor to fully_shard"):
        vc.no_sync(nn.Linear(2, 2))
    with pytest.raises(vc.CommError, match="this SGD reduces no gradients"):
        vc.no_sync(torch.optim.SGD(nn.Linear(2, 2).parameters()))
