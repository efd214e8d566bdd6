"""torch's DistributedDataParallel over one mesh axis around a module whose parameters lie on the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication, parallelize_module
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 6, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.ranks(4)
def test_ddp_over_dp_around_tensor_parallel() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    ours.up.weight = nn.Parameter(distribute_tensor(plain.up.weight.detach(), tp, [Shard(0)]))
    ours.up.bias = nn.Parameter(distribute_tensor(plain.up.bias.detach(), tp, [Shard(0)]))
    ours.down.weight = nn.Parameter(distribute_tensor(plain.down.weight.detach(), tp, [Shard(1)]))
    ddp = DistributedDataParallel(ours, process_group=dp.get_group())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = distribute_tensor(x.chunk(2)[dp.get_local_rank()], tp, [Replicate()])
        with implicit_communication("error"):
            for m, value, optimizer in ((plain, x, optimizers[0]), (ddp, mine, optimizers[1])):
                optimizer.zero_grad()
                m(value).pow(2).mean().backward()
                optimizer.step()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4)
def test_ddp_over_ranks_that_hold_different_shards() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(Net(), mesh, {"parameter": {"up.weight": {"tp": Shard(0)}}})
    for group in (None, mesh.get_group("tp")):
        with pytest.raises(UnsupportedOperationError, match=r"parts of 'up.weight' for copies"):
            DistributedDataParallel(model, process_group=group)
    with pytest.raises(UnsupportedOperationError, match="hold different shards"):
        DistributedDataParallel(model, device_mesh=mesh["tp"])
    before = model.up.weight.detach().full_tensor()
    DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    assert torch.equal(model.up.weight.detach().full_tensor(), before)
