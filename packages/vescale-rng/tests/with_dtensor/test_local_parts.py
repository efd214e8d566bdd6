"""`local_parts` around operators on vescale_dtensor's DTensor, which says itself how it is sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard as TorchShard

from vescale_rng import local_parts
from vescale_testing import cached_mesh

vescale_dtensor = pytest.importorskip("vescale_dtensor")

FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.clone().uniform_(),
    lambda t: F.dropout(t, 0.4),
    lambda t: nn.init.trunc_normal_(t.clone(), a=-1.0, b=1.0),
    lambda t: nn.init.orthogonal_(t.clone()),
]


@pytest.mark.ranks(2, pool=True)
def test_sharded_tensors_within_the_block_go_their_own_way(world: object) -> None:
    mesh = cached_mesh(world)
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    for index, function in enumerate(FUNCTIONS):
        torch.manual_seed(2)
        expected, state = function(x), torch.get_rng_state()
        sharded = vescale_dtensor.distribute_tensor(x, mesh, [vescale_dtensor.Shard(0)])
        torch.manual_seed(2)
        with local_parts(mesh, [TorchShard(0)]), local_parts(mesh, [TorchShard(1)]):
            got = function(sharded)
        assert torch.equal(torch.get_rng_state(), state), index
        assert torch.equal(got.full_tensor(), expected), index
