"""`meshgrid` against one device, with its inputs sharded and whole."""

from __future__ import annotations

import pytest
import torch

from vescale_dtensor import implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("shapes", [[(5,), (6,)], [(4,), (), (3,)], [(2,)]], ids=str)
def test_meshgrid(shapes: list[tuple[int, ...]], indexing: str) -> None:
    args = [torch.randn(s, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for s in shapes]
    for mesh_shape in ((4,), (2, 2)):
        for codes in random_codes(args, len(mesh_shape), seed=len(shapes), count=8):
            mesh = cached_mesh(*mesh_shape)
            check_op(lambda *x: torch.meshgrid(*x, indexing=indexing), args, codes, mesh)
            check_op(lambda *x: torch.meshgrid(list(x), indexing=indexing), args, codes, mesh)


@pytest.mark.ranks(4, pool=True)
def test_meshgrid_sends_nothing() -> None:
    args = [torch.arange(5.0, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64)]
    with implicit_communication("error"):
        x, y = check_op(lambda a, b: torch.meshgrid(a, b, indexing="ij"), args, ["S0 I", "I S0"], cached_mesh(2, 2))
    assert [p.dim for p in x.placements] == [p.dim for p in y.placements] == [0, 1]
