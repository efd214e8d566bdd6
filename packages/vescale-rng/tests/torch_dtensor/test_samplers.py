"""Within `portable` and `emulate_cuda`, DTensors of torch draw what plain tensors draw there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale_rng._cuda.emulate import emulate_cuda
from vescale_rng._portable.mode import portable
from vescale_rng._torch_dtensor import single_device
from vescale_rng.errors import AgreementError, UnsupportedRandomOperatorError
from vescale_testing import cached_mesh

BLOCKS = {"portable": lambda: portable(3), "A100": lambda: emulate_cuda("A100", seed=3)}
FUNCTIONS = {
    "uniform_": lambda t: t.uniform_(-1, 1),
    "rand_like": torch.rand_like,
    "randint_like": lambda t: torch.randint_like(t, 100),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
    "dropout": lambda t: F.dropout(t, 0.3),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "kaiming": lambda t: torch.nn.init.kaiming_uniform_(t),
    "trunc_normal_": lambda t: torch.nn.init.trunc_normal_(t, a=-1, b=1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", BLOCKS)
def test_dtensors_draw_what_plain_tensors_draw(world, block):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    functions = dict(FUNCTIONS)
    if block == "portable":
        functions["multinomial"] = lambda t: torch.multinomial(t.abs(), 3)
    with single_device():
        for name, function in functions.items():
            for placement in (Shard(0), Shard(1), Replicate()):
                with BLOCKS[block]():
                    expected, state = function(x.clone()), torch.get_rng_state()
                sharded = distribute_tensor(x.clone(), cached_mesh(world), [placement], src_data_rank=None)
                with BLOCKS[block]():
                    got = function(sharded)
                    assert torch.equal(torch.get_rng_state(), state), name
                assert torch.equal(got.full_tensor(), expected), name
        with BLOCKS[block](), pytest.raises(UnsupportedRandomOperatorError, match="poisson"):
            torch.poisson(sharded.abs())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks(2)
def test_seeds_that_differ_are_found(rank, world):
    x = distribute_tensor(torch.ones(7, 6), cached_mesh(world), [Shard(0)], src_data_rank=None)
    with single_device(), portable(rank), pytest.raises(AgreementError):
        x.uniform_()
