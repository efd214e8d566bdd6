"""Newest values of parameters: they are waited for where they are used, and missed where that cannot be seen."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm.errors import CommError, StaleParameterError


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)).to(dtype)


def data(steps: int, world: int) -> Tensor:
    return torch.randn(steps, world * 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mine(x: Tensor, rank: int) -> Tensor:
    return x[2 * rank : 2 * rank + 2]


@pytest.mark.ranks(2)
def test_a_parameter_that_nobody_waited_for_is_found(rank: int, world: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.1, bucket_mb=1e-6, transport="p2p")
    x = mine(data(1, world)[0], rank)
    kept = model[1].weight

    def sneak() -> Tensor:
        # The weight is not read from its module.
        return nn.functional.linear(model[0](x), kept).square().mean()

    sneak().backward()
    optimizer.step()
    optimizer.zero_grad()
    sneak().backward()
    with pytest.raises(StaleParameterError, match=r"^1\.weight was used in a forward"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.finish_param_sync()
    sneak().backward()
    optimizer.step()
    # A graph from before a step must not go backward after it.
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.ranks(2)
def test_whoever_reads_parameters_from_the_model_finds_new_values(rank: int, world: int) -> None:
    reads: list[Any] = [
        lambda model: [p.detach().clone() for p in model.parameters()],
        lambda model: [p.detach().clone() for _, p in model.named_parameters()],
        lambda model: list(model.state_dict().values()),
        lambda model: list(copy.deepcopy(model).parameters()),
        lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
        lambda model: [getattr(model, name) for name in dict(model.named_parameters())],
        lambda model: list(torch.optim.swa_utils.AveragedModel(model).module.parameters()),
    ]
    torch.manual_seed(0)
    model = nn.LSTM(3, 4).double()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.1, bucket_mb=1e-5, transport="p2p")
    for read in reads:
        optimizer.zero_grad()
        model(mine(data(1, world)[0], rank))[0].square().mean().backward()
        optimizer.step()
        early = torch.cat([value.detach().flatten() for value in read(model)])
        optimizer.finish_param_sync()
        late = torch.cat([value.detach().flatten() for value in model.parameters()])
        assert torch.equal(early, late)
        assert type(model._parameters) is dict
        parts = [torch.empty_like(late) for _ in range(world)]
        dist.all_gather(parts, late)
        assert torch.equal(parts[0], parts[1])
    # What is written while values are under way is not overwritten by them.
    optimizer.step()
    model.bias_hh_l0.detach().fill_(3.0)
    model.register_parameter("new", nn.Parameter(torch.ones(2)))
    del model.new
    optimizer.finish_param_sync()
    assert (model.bias_hh_l0 == 3).all()
    assert not hasattr(model, "new")


@pytest.mark.ranks(2)
def test_memory_that_ranks_share_is_guarded(rank: int, world: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.1, transport="shared", share_parameters=True)
    x = mine(data(1, world)[0], rank)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.finish_param_sync()
    dist.barrier()
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    dist.barrier()
    with pytest.raises(CommError, match=r"0\.weight was changed in place"):
        optimizer.step()
    optimizer.accept_changes()
    optimizer.step()
    with pytest.raises(ValueError, match="share_parameters: the transport p2p"):
        DistributedOptimizer(net(), torch.optim.SGD, transport="p2p", share_parameters=True)
