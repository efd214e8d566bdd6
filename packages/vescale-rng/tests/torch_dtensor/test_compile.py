"""torch.compile: random operators on DTensors break the graph and are right, or are an error; never silently others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

from vescale_rng._torch_dtensor import single_device
from vescale_testing import cached_mesh

FUNCTIONS = {
    "dropout": lambda t: F.dropout(t * 2, 0.3) + 1,
    "uniform_": lambda t: (t * 1).uniform_() + 1,
}


@pytest.mark.ranks(2, timeout=120)
def test_graphs_break_at_random_operators(world):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, cached_mesh(world), [Shard(0)], src_data_rank=None)
    with single_device():
        for name, function in FUNCTIONS.items():
            torch.manual_seed(5)
            expected = [function(x), function(x)]
            state = torch.get_rng_state()
            compiled = torch.compile(function, backend="aot_eager")
            torch.manual_seed(5)
            got = [compiled(sharded), compiled(sharded)]
            assert torch.equal(torch.get_rng_state(), state), name
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a.full_tensor(), b), name
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="vescale_rng draws"):
            torch.compile(torch.rand_like, backend="aot_eager", fullgraph=True)(sharded)


@pytest.mark.ranks(2, timeout=120)
def test_what_draws_nothing_is_compiled_as_ever(world):
    sharded = distribute_tensor(torch.ones(7, 6), cached_mesh(world), [Shard(0)], src_data_rank=None)
    with single_device():
        compiled = torch.compile(lambda t: torch.empty_like(t).fill_(2) + t, backend="aot_eager", fullgraph=True)
        assert compiled(sharded).full_tensor().sum() == 7 * 6 * 3
