"""Objects of all ranks, where numpy is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import DTensor, Shard, deferred_init, parallelize_module
from vescale_dtensor._comm.objects import gather_objects
from vescale_testing import cached_mesh


def _no_numpy(*_: Any) -> None:
    raise RuntimeError("Numpy is not available")


@pytest.mark.ranks(4, pool=True)
def test_objects_of_any_length(rank: int) -> None:
    found = gather_objects({"rank": "r" * rank * 1000}, dist.group.WORLD, "cpu")
    assert found == [{"rank": "r" * r * 1000} for r in range(4)]


@pytest.mark.ranks(4, pool=True)
def test_nothing_needs_numpy(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install torch`, which does not bring it: what torch itself says then."""
    monkeypatch.setattr(torch.Tensor, "numpy", _no_numpy)
    mesh = cached_mesh(4, names=("dp",))
    torch.manual_seed(0)
    model = parallelize_module(nn.Linear(4, 4), mesh, {"forward": {"input": [Shard(0)]}})
    assert model(torch.ones(6, 4)).shape == (6, 4)
    assert DTensor.from_local(torch.ones((2, 2, 2, 0)[rank], 4), mesh, [Shard(0)], run_check=True).shape == (6, 4)
    with pytest.raises(ValueError, match="input 'input' of the parallelized module differs"):
        model(torch.full((6, 4), float(rank)))
    with deferred_init():
        late = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    parallelize_module(late, mesh, {"parameter": {"0.weight": [Shard(0)]}})
    assert late(torch.ones(6, 4)).shape == (6, 4)
