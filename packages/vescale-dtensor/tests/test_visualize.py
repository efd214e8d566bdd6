"""Pictures of who holds what."""

from __future__ import annotations

import pytest
import torch

from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._visualize import visualize
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


@RANKS
def test_matrix_cut_both_ways() -> None:
    x = distribute_tensor(torch.zeros(5, 8), cached_mesh(2, 2, names=("dp", "tp")), [Shard(0), Shard(1)])
    assert visualize(x).splitlines() == [
        "shape [5, 8] on mesh (dp=2: Shard(dim=0), tp=2: Shard(dim=1))",
        "       0:4      4:8",
        "    +--------+--------+",
        "0:3 | rank 0 | rank 1 |",
        "    +--------+--------+",
        "3:5 | rank 2 | rank 3 |",
        "    +--------+--------+",
    ]


@RANKS
def test_vector_with_replicas_and_empty_parts() -> None:
    text = visualize((2,), cached_mesh(4, names=("dp",)), [Shard(0)], show=False)
    assert text.splitlines()[1:] == [
        "    0:1      1:2",
        " +--------+--------+",
        " | rank 0 | rank 1 |",
        " +--------+--------+",
        "nothing: ranks 2,3",
    ]
    text = visualize((4,), cached_mesh(2, 2, names=("dp", "tp")), [Replicate(), Shard(0)], show=False)
    assert " | ranks 0,2 | ranks 1,3 |" in text.splitlines()


@RANKS
def test_pending_scalar_and_three_dims() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    text = visualize((), mesh, [Partial(), Replicate()], show=False)
    assert "pending sum" in text
    assert " | ranks 0,1,2,3 |" in text
    lines = visualize((2, 4, 3), mesh, [Replicate(), Shard(1)], show=False).splitlines()
    assert lines[1:] == ["[0:2, 0:2, 0:3]  ranks 0,2", "[0:2, 2:4, 0:3]  ranks 1,3"]
    assert visualize((0, 4, 3), mesh, [Replicate(), Shard(1)], show=False).splitlines()[1:] == ["no elements"]


@RANKS
def test_arguments_that_do_not_fit() -> None:
    mesh = cached_mesh(4, names=("dp",))
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="has a mesh and placements of its own"):
        visualize(x, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="give device_mesh and placements too"):
        visualize((4,))
