"""Factories against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vescale_dtensor import DTensor, Replicate, Shard
from vescale_dtensor import _factories as ours
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements

RANKS = pytest.mark.ranks(4, pool=True)

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "zeros": ((5, 3), {}),
    "ones": (((5, 3),), {"dtype": torch.int32}),
    "full": (((4, 2), 2.5), {}),
    "eye": ((5,), {}),
}


@RANKS
@pytest.mark.parametrize("name", CASES)
def test_values_equal_those_of_torch(name: str) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    args, kwargs = CASES[name]
    expected = getattr(torch, name)(*args, **kwargs)
    for codes in all_codes(expected.ndim, 2, partial=True):
        got = getattr(ours, name)(*args, **kwargs, device_mesh=mesh, placements=placements(codes))
        assert got.dtype == expected.dtype
        assert got.placements == tuple(placements(codes))
        assert tuple(got.to_local().shape) == tuple(got.local_shape)
        assert torch.equal(got.full_tensor(), expected), codes


@RANKS
@pytest.mark.parametrize(
    "args", [(10,), (3, 10), (3, 10, 2), (10, 3, -3), (0.5, 7.3, 0.7), (0,), (5.0,), (1, 9, 0.25)], ids=str
)
def test_arange(args: tuple[Any, ...]) -> None:
    for mesh_shape in ((4,), (2, 2)):
        expected = torch.arange(*args)
        for codes in all_codes(1, len(mesh_shape), partial=True):
            got = ours.arange(*args, device_mesh=cached_mesh(*mesh_shape), placements=placements(codes))
            assert got.dtype == expected.dtype
            assert torch.equal(got.full_tensor(), expected), codes


@RANKS
def test_linspace_and_gradients() -> None:
    mesh = cached_mesh(4)
    got = ours.linspace(0, 1, 11, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    assert torch.equal(got.detach().full_tensor(), torch.linspace(0, 1, 11))
    (got * got).sum().backward()
    torch.testing.assert_close(got.grad.full_tensor(), 2 * torch.linspace(0, 1, 11))
    assert ours.empty(7, 3, device_mesh=mesh, placements=[Shard(0)]).local_shape[1] == 3


@RANKS
def test_random_factories_are_reproducible() -> None:
    mesh = cached_mesh(2, 2)
    makers: dict[str, Callable[..., DTensor]] = {
        "rand": lambda **k: ours.rand(40, 6, **k),
        "randn": lambda **k: ours.randn((40, 6), **k),
        "randint": lambda **k: ours.randint(3, 9, (40, 6), **k),
    }
    for name, maker in makers.items():
        for codes in ("S0 I", "I I", "S0 S1", "P S0", "R S1"):
            results = []
            for _ in range(2):
                torch.manual_seed(5)
                results.append(maker(device_mesh=mesh, placements=placements(codes)).full_tensor())
            assert torch.equal(*results), (name, codes)
            assert results[0].unique().numel() > (5 if name == "randint" else 100)
            if name == "randint":
                assert results[0].dtype == torch.int64
                assert 3 <= int(results[0].min()) <= int(results[0].max()) < 9
    assert ours.randint(4, (8,), device_mesh=mesh).full_tensor().max() < 4


@RANKS
def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="device_mesh is missing"):
        ours.zeros(3)
    mesh = cached_mesh(4)
    with pytest.raises(ValueError, match="sizes must be integers"):
        ours.zeros(3, -1, device_mesh=mesh)
    with pytest.raises(ValueError, match="DTensors are strided"):
        ours.zeros(3, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(ValueError, match="placements has 2 entries"):
        ours.zeros(3, device_mesh=mesh, placements=[Replicate(), Replicate()])
    with pytest.raises(TypeError, match="expected a sequence of sizes"):
        ours.randint(3, 4, 5, device_mesh=mesh)  # type: ignore[arg-type]
