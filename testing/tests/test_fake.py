"""Fake process groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale_testing import fake_ranks


def test_a_world_of_1024() -> None:
    with fake_ranks(1024, rank=77):
        mesh = init_device_mesh("cpu", (32, 32), mesh_dim_names=("dp", "tp"))
        assert tuple(mesh.get_coordinate() or ()) == (77 // 32, 77 % 32)
        assert dist.get_world_size() == 1024
    assert not dist.is_initialized()


def test_the_group_goes_after_an_error_too() -> None:
    with pytest.raises(KeyError), fake_ranks(4):
        raise KeyError
    with fake_ranks(4):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4; use 0 to 3"), fake_ranks(4, rank=4):
        pass
    with fake_ranks(4, rank=1), pytest.raises(RuntimeError, match="already is rank 1 of 4"), fake_ranks(4):
        pass


@pytest.mark.fake_ranks(2048, ranks=[0, 5, 2047])
def test_the_marker_repeats_a_test_over_ranks(rank: int, world: int) -> None:
    assert world == dist.get_world_size() == 2048
    assert dist.get_rank() == rank
    assert rank in (0, 5, 2047)


@pytest.mark.fake_ranks(1024)
def test_the_marker_chooses_ranks(rank: int) -> None:
    assert dist.get_rank() == rank
    assert rank in (0, 1, 512, 1023)
