"""What must not depend on the rank, nor on what happens to be made first while a call is recorded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Replicate, Shard, distribute_tensor, parallelize_module, static
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


@RANKS
def test_what_is_read_of_a_mesh_for_the_first_time_is_no_part_of_a_record() -> None:
    """As in Gemma, whose rotary embedding cuts a dim that is sharded because it has one head of keys."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # one of which nothing is known yet
    data = torch.arange(32.0).view(4, 8)
    x = distribute_tensor(data, mesh, [Shard(1), Replicate()])
    fixed = static(lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1))
    for _ in range(3):
        assert torch.equal(fixed(x).full_tensor(), torch.cat((-data[:, 3:], data[:, :3]), dim=-1))
    assert "def program" in fixed.static_code()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, log: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def batch(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def pair(*shape: int) -> tuple[nn.Module, nn.Module]:
    mesh = cached_mesh(*shape, names=("dp", "tp"))
    torch.manual_seed(0)
    single = Net()
    return single, parallelize_module(copy.deepcopy(single), mesh, {"forward": {"input.x": {"dp": Shard(0)}}})


def same(single: nn.Module, parallel: nn.Module) -> None:
    for (name, a), b in zip(single.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12, msg=name)


@RANKS
@pytest.mark.parametrize("fixed", [False, True])
def test_parameters_that_are_replaced_travel_in_one_order_on_all_ranks(fixed: bool, rank: int) -> None:
    """Addresses of new parameters are those of old ones on some ranks, where the old ones are gone."""
    single, parallel = pair(2, 2)
    if fixed:
        static(parallel)
    kept = []
    for step in range(16):
        for net in (single, parallel):
            if step % 2:
                old = [layer.weight for layer in net.layers]
                if rank < 2:
                    kept += old  # they live on here
                for layer in net.layers:
                    layer.weight = nn.Parameter(layer.weight.detach() * 1.1)
                del old, layer
            net.zero_grad()
            net(batch(step)).backward()
        same(single, parallel)


@RANKS
def test_a_flag_of_one_rank_sends_what_the_other_ranks_send(rank: int) -> None:
    """Rank 0 records another signature while the others run their program."""
    for shape in ((2, 2), (4, 1)):
        single, parallel = pair(*shape)
        static(parallel)
        for step in range(10):
            for net in (single, parallel):
                net.zero_grad()
                net(batch(step), log=rank == 0 and step % 3 == 2).backward()
            same(single, parallel)
        assert parallel.static_code().count("def program") == (2 if rank == 0 else 1)


class Thrice(nn.Module):
    """Its bias, which is added to a pending sum, is moved for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, uses: int = 3) -> Tensor:
        for _ in range(uses):
            x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x.square().mean()


@RANKS
@pytest.mark.parametrize("uses", [2, 3, 4])
def test_gradients_of_a_layer_that_is_used_again_are_added_in_one_order(uses: int) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    plan = {
        "parameter": {r"up\..*": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
        "forward": {"input.x": {"dp": Shard(0)}},
    }
    one, two = (parallelize_module(Thrice(), mesh, plan) for _ in range(2))
    two.load_state_dict(one.state_dict())
    static(two)
    for step in range(8):
        for net in (one, two):
            net.zero_grad()
            net(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)), uses).backward()
        for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), (step, name)
    assert "def program" in two.static_code()
