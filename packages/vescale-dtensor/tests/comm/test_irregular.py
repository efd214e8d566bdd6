"""Redistribution from and to ragged and interleaved layouts: value and gradient stay, with one collective."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_dtensor import distribute_tensor
from vescale_dtensor._comm import record
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements


def _part(x: Tensor, code: str, sizes: tuple[int, ...], at: tuple[int, ...]) -> Tensor:
    """A rank's part on paper: shards first, in the order of the mesh, then ragged pieces of the flattened rest."""
    for shards in (True, False):
        for c, size, index in zip(code.split(), sizes, at, strict=True):
            first, _, rest = c[1:].partition("/")
            if shards and c[0] == "S":
                chunks = x.split(max(-(-x.shape[int(first)] // size), 1), int(first))
                x = chunks[index] if index < len(chunks) else x.narrow(int(first), 0, 0)
            elif shards and c[0] == "N":
                d = int(first)
                blocks = x.split(max(x.shape[d] // int(rest), 1), d)
                x = torch.cat([_part(b, f"S{d}", (size,), (index,)) for b in blocks], d)
            elif not shards and c[0] == "G":
                lead, units = int(first), [int(u) for u in rest.split(".")]
                flat = x.flatten(0, lead - 1)
                rows, total = flat.shape[0], sum(units)
                start, stop = (rows * sum(units[: index + i]) // total for i in (0, 1))
                x = flat[start:stop].reshape((1,) * (lead - 1) + (stop - start, *x.shape[lead:]))
    return x


def _check(shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: str, target: str) -> list[str]:
    """The moved tensor is the same tensor, its part is the one on paper, and its gradient that of one device."""
    mesh = cached_mesh(*mesh_shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    d = distribute_tensor(x, mesh, placements(source))
    seen: list[str] = []
    record.listeners.append(lambda event: seen.append(event.name))
    try:
        y = d.redistribute(placements(target))
    finally:
        record.listeners.pop()
    assert y.shape == x.shape
    at = tuple(mesh.get_coordinate() or ())
    for t, code in ((d, source), (y, target)):
        if "P" not in code:
            assert torch.equal(t.to_local(), _part(x.detach(), code, mesh_shape, at)), code
    torch.testing.assert_close(y.full_tensor(), x, rtol=0, atol=1e-14)
    y.full_tensor().pow(2).sum().backward()
    assert d.grad.shape == x.shape
    torch.testing.assert_close(d.grad.full_tensor(), 2 * x, rtol=0, atol=1e-13)
    return seen


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(6, 4), (3, 8), (0, 4)], ids=str)
def test_all_pairs_on_one_axis(shape: tuple[int, ...]) -> None:
    codes = ["S0", "S1", "I", "R", "P", "G1/1.1.1.1", "G1/0.2.0.1", "G2/1.0.3.2", "G2/0.0.6.0", "N1/2", "N1/4"]
    for source, target in itertools.product(codes, repeat=2):
        seen = _check(shape, (4,), source, target)
        assert len(seen) <= 1, (source, target, seen)


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize("shape", [(6, 12), (5, 6)], ids=str)
def test_beside_shards_in_both_orders(shape: tuple[int, ...]) -> None:
    codes = ["S0 G1/3.1", "G1/3.1 S0", "G2/1.2 S1", "S1 G2/0.1", "G2/1.2 G2/1.1", "N1/3 S0", "S0 N1/3", "N1/3 N1/3"]
    codes += ["G1/1.0 N1/2", "P G2/1.2", "I G1/1.3", "G2/1.1 R"]
    for source, target in [*zip(codes, codes[1:] + codes[:1], strict=True), *zip(codes, reversed(codes), strict=True)]:
        _check(shape, (2, 2), source, target)
    for code in codes:
        for whole in ("I I", "S0 S1", "S1 S1", "P P", "R S0"):
            assert len(_check(shape, (2, 2), code, whole)) <= 1 + ("P" in code), (code, whole)
            assert len(_check(shape, (2, 2), whole, code)) <= 1, (whole, code)


def _codes(ndim: int, size: int) -> st.SearchStrategy[str]:
    units = st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any)
    ragged = st.builds(lambda n, u: f"G{n}/{'.'.join(map(str, u))}", st.integers(1, ndim), units)
    blocks = st.builds(lambda d, k: f"N{d}/{k}", st.integers(0, ndim - 1), st.sampled_from([2, 3]))
    return st.one_of(ragged, blocks, st.sampled_from([*(f"S{d}" for d in range(ndim)), "I", "R", "P"]))


@pytest.mark.ranks(4, pool=True, timeout=120)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), data=st.data())
def test_any_layout_to_any_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    both = st.tuples(_codes(len(shape), 2), _codes(len(shape), 2)).map(" ".join)
    source, target = data.draw(both), data.draw(both)
    mesh = cached_mesh(2, 2)
    try:
        for code in (source, target):
            distribute_tensor(torch.empty(shape, device="meta"), mesh, placements(code))
    except ValueError:  # blocks that do not divide the dim, cuts that do not go together
        return
    _check(shape, (2, 2), source, target)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("P", "G2/1.0.3.2", ["reduce_scatter"]),
        ("P", "N1/2", ["reduce_scatter"]),
        ("G1/1.1.1.1", "I", ["all_gather"]),
        ("G1/0.4.0.0", "I", ["all_to_all"]),  # gathering would send the padding of three ranks
        ("G1/1.2.1.0", "S1", ["all_to_all"]),
        ("N1/2", "S1", ["all_to_all"]),
        ("I", "G2/1.2.3.0", []),
        ("R", "N1/2", []),
        ("G1/1.1.1.1", "P", []),
    ],
)
def test_collectives(source: str, target: str, expected: list[str]) -> None:
    assert _check((4, 8), (4,), source, target) == expected


@pytest.mark.ranks(4, pool=True)
def test_axes_of_one_rank_move_nothing() -> None:
    """What changes along them only changes the shape of the local part."""
    for source, target in [("S0 S0", "G2/1 S0"), ("G1/3 S1", "S1 S1"), ("G2/1 G2/1.0.2.1", "I G2/1.0.2.1")]:
        assert _check((4, 8), (1, 4), source, target) == [], (source, target)


@pytest.mark.ranks(4, pool=True)
def test_types_that_the_backend_cannot_send() -> None:
    mesh = cached_mesh(4)
    for dtype in (torch.int16, torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64):
        x = torch.arange(24).view(4, 6).to(dtype)
        for code in ("G2/1.2.0.3", "N1/3"):
            d = distribute_tensor(x, mesh, placements(code))
            assert d.dtype == dtype
            assert torch.equal(d.full_tensor(), x)
            if dtype not in (torch.bool, torch.uint8):
                pending = distribute_tensor(x, mesh, placements("P"))
                assert torch.equal(pending.redistribute(placements(code)).to_local(), d.to_local())


@pytest.mark.ranks(4, pool=True)
def test_async_and_second_derivative() -> None:
    mesh = cached_mesh(4)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    d = distribute_tensor(x, mesh, placements("G2/3.0.1.2"))
    pending = d.redistribute(placements("N1/2"), async_op=True)
    y = pending.wait()
    assert torch.equal(y.full_tensor(), x)
    (grad,) = torch.autograd.grad(y.full_tensor().pow(3).sum(), d, create_graph=True)
    assert grad.placements == d.placements
    (second,) = torch.autograd.grad(grad.full_tensor().sum(), d)
    torch.testing.assert_close(second.full_tensor(), 6 * x.detach())
