"""Ranks as threads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale_testing import run_threads


def test_eight_ranks_compute_on_a_mesh() -> None:
    weight = torch.arange(64.0).reshape(8, 8)

    def body(rank: int) -> tuple[int, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        sharded = distribute_tensor(weight, mesh, [Shard(0), Shard(1)])
        product = sharded @ sharded
        assert isinstance(product, DTensor)
        return dist.get_rank(), product.redistribute(mesh, [Replicate(), Replicate()]).to_local()

    results = run_threads(8, body)
    assert [rank for rank, _ in results] == list(range(8))
    assert all(torch.equal(product, weight @ weight) for _, product in results)
    assert not dist.is_initialized()


def test_an_error_is_raised_with_its_rank_and_releases_the_others() -> None:
    def body(rank: int) -> None:
        if rank == 3:
            raise ValueError("no")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="no") as caught:
        run_threads(8, body)
    assert caught.value.__notes__ == ["in thread rank 3 of 8"]  # type: ignore[attr-defined]
    assert run_threads(2, lambda rank: rank) == [0, 1]


def test_a_deadlock_ends_with_stacks() -> None:
    def body(rank: int) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(TimeoutError, match=r"after 0.3 s these ranks still ran:\n---- rank 0 ----") as caught:
        run_threads(3, body, timeout=0.3)
    assert "---- rank 2 ----" in str(caught.value)
    assert "---- rank 1 ----" not in str(caught.value)
    assert run_threads(2, lambda rank: rank) == [0, 1]


def test_limits() -> None:
    for world in (0, 17):
        with pytest.raises(ValueError, match=f"world={world}"):
            run_threads(world, lambda rank: rank)
    assert run_threads(16, lambda rank: rank) == list(range(16))
