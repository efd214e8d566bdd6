"""Programs as users write them, on torch's own DTensor and real ranks, against the same program on plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from vescale_rng._torch_dtensor import single_device
from vescale_testing import cached_mesh


def _parts():
    return [nn.Linear(16, 9), nn.Embedding(13, 16), nn.Conv1d(6, 5, 3), nn.LayerNorm(7), nn.Linear(9, 2, bias=False)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_fsdp_meta_init_is_eager_init(shape):
    torch.manual_seed(0)
    plain = nn.Sequential(*_parts())
    state = torch.get_rng_state()

    mesh = cached_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    with torch.device("meta"):
        model = nn.Sequential(*_parts())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with single_device():
        for layer in model:
            layer.reset_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(got, DTensor)
        assert torch.equal(got.full_tensor(), expected), name


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 32)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(32, 12)

    def forward(self, x):
        return F.dropout(self.down(F.dropout(F.relu(self.up(self.norm(x))), 0.2)), 0.1)


@pytest.mark.ranks(2)
def test_tensor_parallel_mlp_with_dropout(world):
    torch.manual_seed(1)
    plain = MLP()
    x = torch.randn(3, 8, 12)
    mesh = cached_mesh(world)
    torch.manual_seed(1)
    model = MLP()
    plan = {
        "norm": SequenceParallel(sequence_dim=1),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    with single_device():
        for step in range(3):
            torch.manual_seed(step)
            expected = plain(x)
            state = torch.get_rng_state()
            expected.square().mean().backward()
            torch.manual_seed(step)
            got = model(distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None))
            assert torch.equal(torch.get_rng_state(), state)
            got.square().mean().backward()
            whole = got.full_tensor()
            assert torch.equal(whole == 0, expected == 0)  # the masks are equal; sums may differ in the last bits
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-6)
                a.grad = b.grad = None


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(world, reentrant):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, cached_mesh(world), [Shard(1)], src_data_rank=None).requires_grad_()
    plain = x.clone().requires_grad_()

    def block(t):
        return (F.dropout(t, 0.5) ** 2 + torch.rand_like(t) * t).exp()

    with single_device():
        for t in (plain, sharded):
            torch.manual_seed(1)
            result = checkpoint(block, t, use_reentrant=reentrant)
            torch.rand(3)
            result.sum().backward()
    assert torch.equal(sharded.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(2, pool=True)
def test_states_are_saved_forked_and_restored_as_ever(world):
    mesh = cached_mesh(world)
    x = distribute_tensor(torch.ones(7, 5), mesh, [Shard(0)], src_data_rank=None)
    with single_device():
        torch.manual_seed(2)
        state = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            first = x.uniform_().full_tensor()
            torch.rand_like(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(x.uniform_().full_tensor(), first)
        torch.set_rng_state(state)
        columns = distribute_tensor(torch.ones(7, 5), mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal(columns.uniform_().full_tensor(), first)


@pytest.mark.ranks(4, pool=True)
def test_sub_meshes_and_seeds_beyond_32_bits():
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    with single_device():
        for sub in (mesh["dp"], mesh["tp"]):
            torch.manual_seed(2**40 + 3)
            got = distribute_tensor(torch.empty(5, 6), sub, [Shard(1)], src_data_rank=None).normal_()
            state = torch.get_rng_state()
            torch.manual_seed(2**40 + 3)
            assert torch.equal(got.full_tensor(), torch.empty(5, 6).normal_())
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.ranks(4)
def test_strided_shards_of_fsdp_over_tensor_parallel():
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    for rows in (8, 7):
        torch.manual_seed(0)
        plain = nn.Linear(6, rows)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, rows))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        assert type(model[0].weight.placements[0]).__name__ == "_StridedShard"
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with single_device():
            model[0].reset_parameters()
        for got, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), whole), rows


@pytest.mark.ranks(2)
def test_results_of_collectives_in_flight(world):
    """The local tensor of a redistributed DTensor may still be on its way."""
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    mesh = cached_mesh(world)
    with single_device():
        for function in (torch.bernoulli, torch.rand_like, torch.poisson, lambda t: t.uniform_()):
            rows = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
            torch.manual_seed(6)
            got = function(rows.redistribute(placements=[Replicate()], async_op=True))
            torch.manual_seed(6)
            assert torch.equal(got.full_tensor(), function(x.clone()))
