"""Redistribution: every pair of layouts keeps the value and the gradient, with the fewest collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Replicate, Shard, Varying, distribute_tensor
from vescale_dtensor._comm import record
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements


def _input(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _check_move(shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: str, target: str) -> None:
    """The moved tensor is the same tensor, and its gradient is the single-device gradient."""
    mesh = cached_mesh(*mesh_shape)
    x = _input(shape).requires_grad_()
    d = distribute_tensor(x, mesh, placements(source))
    y = d.redistribute(placements(target))
    assert list(y.placements) == placements(target)
    assert tuple(y.to_local().shape) == tuple(y.local_shape)
    torch.testing.assert_close(y.full_tensor(), x, rtol=0, atol=1e-14)
    y.full_tensor().pow(2).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), 2 * x, rtol=0, atol=1e-13)


@contextmanager
def collectives() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def listen(event: record.Collective) -> None:
        seen.append((event.name, event.axes))

    record.listeners.append(listen)
    try:
        yield seen
    finally:
        record.listeners.remove(listen)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 2), (1, 4), (0, 3)], ids=str)
def test_all_pairs_on_one_axis(shape: tuple[int, ...]) -> None:
    for source, target in itertools.product(all_codes(2, 1, partial=True), repeat=2):
        _check_move(shape, (4,), source, target)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 4)], ids=str)
@pytest.mark.parametrize("source", all_codes(2, 2, partial=True))
def test_all_pairs_on_two_axes(shape: tuple[int, ...], source: str) -> None:
    for target in all_codes(2, 2, partial=True):
        _check_move(shape, (2, 2), source, target)


@pytest.mark.ranks(8, pool=True, timeout=120)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_three_axes(shape: tuple[int, ...], data: st.DataObject) -> None:
    codes = st.sampled_from([f"S{d}" for d in range(len(shape))] + ["I", "R", "P"])
    source, target = (" ".join(data.draw(st.tuples(codes, codes, codes))) for _ in range(2))
    _check_move(shape, (2, 2, 2), source, target)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("P P", "I I", [("all_reduce", (0, 1))]),
        ("P P", "S0 S1", [("reduce_scatter", (0, 1))]),
        ("P P", "S0 S0", [("reduce_scatter", (0, 1))]),
        ("S0 S1", "I I", [("all_gather", (0, 1))]),
        ("S0 S0", "I I", [("all_gather", (0, 1))]),
        ("S0 S0", "I S0", [("all_to_all", (0, 1))]),
        ("S0 S1", "S1 S0", [("all_to_all", (0, 1))]),
        ("S0 I", "S1 I", [("all_to_all", (0,))]),
        ("I P", "I S0", [("reduce_scatter", (1,))]),
        ("S0 P", "S0 S1", [("reduce_scatter", (1,))]),
        ("P I", "I S0", [("all_reduce", (0,))]),
        ("I S1", "S0 S1", []),
        ("I I", "S0 S0", []),
        ("R I", "I R", []),
        ("I I", "P P", []),
        ("S0 I", "P I", []),
    ],
)
def test_one_collective_serves_several_axes(
    source: str, target: str, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    d = distribute_tensor(_input((8, 8)), cached_mesh(2, 2), placements(source))
    with collectives() as seen:
        d.redistribute(placements(target))
    assert seen == expected


@pytest.mark.ranks(4, pool=True)
def test_slicing_comes_before_the_reduction() -> None:
    """P to I beside I to S moves half of the data, not all of it."""
    d = distribute_tensor(_input((8, 8)), cached_mesh(2, 2), placements("P I"))
    sizes: list[int] = []
    record.listeners.append(lambda event: sizes.append(event.num_bytes))
    try:
        d.redistribute(placements("I S0"))
    finally:
        record.listeners.pop()
    assert sizes == [8 * 8 * 8 // 2]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(("source", "target"), [("S0 I", "I S1"), ("I I", "S0 R"), ("S0 S1", "R R"), ("P I", "S1 I")])
def test_double_backward(source: str, target: str) -> None:
    x = _input((4, 6)).requires_grad_()
    d = distribute_tensor(x, cached_mesh(2, 2), placements(source))

    def penalty(t: Tensor) -> Tensor:
        y = (t.redistribute(placements(target)) if isinstance(t, DTensor) else t).pow(3).sum()
        (g,) = torch.autograd.grad(y, t, create_graph=True)
        return (g * g).sum()

    penalty(x).backward()
    penalty(d).backward()
    torch.testing.assert_close(d.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(["S0 I", "P P", "I R", "S1 S1"], ["S1 I", "I I", "P S0"]))
)
def test_asynchronous_move(source: str, target: str) -> None:
    x = _input((5, 6)).requires_grad_()
    d = distribute_tensor(x, cached_mesh(2, 2), placements(source))
    pending = d.redistribute(placements(target), async_op=True)
    y = pending.wait()
    assert pending.wait() is y
    assert pending.is_completed()
    torch.testing.assert_close(y.full_tensor(), x, rtol=0, atol=1e-14)
    y.full_tensor().pow(2).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), 2 * x, rtol=0, atol=1e-13)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks", [[[3, 1], [0, 2]], [[2, 3], [0, 1]]], ids=str)
def test_a_mesh_may_list_its_ranks_in_any_order(ranks: list[list[int]]) -> None:
    mesh = DeviceMesh("cpu", ranks)
    x = _input((7, 5))
    for source, target in itertools.product(all_codes(2, 2, partial=True), repeat=2):
        y = distribute_tensor(x, mesh, placements(source)).redistribute(placements(target))
        torch.testing.assert_close(y.full_tensor(), x, rtol=0, atol=1e-14)


@pytest.mark.ranks(4)
def test_a_mesh_over_a_part_of_the_world(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 2])
    if rank not in (0, 2):
        with pytest.raises(ValueError, match="is not part of the mesh"):
            distribute_tensor(_input((4, 3)), mesh, placements("S0"))
        return
    d = distribute_tensor(_input((4, 3)), mesh, placements("S0"))
    assert torch.equal(d.full_tensor(), _input((4, 3)))


@pytest.mark.ranks(4, pool=True)
def test_uses_of_one_replicated_tensor_share_a_gradient_reduction() -> None:
    mesh = cached_mesh(4)
    w = distribute_tensor(_input((6, 6)), mesh, [Replicate()]).requires_grad_()
    x = distribute_tensor(_input((8, 6)), mesh, [Shard(0)])
    loss = sum((x @ w).pow(k).sum() for k in (1, 2, 3))
    with collectives() as seen:
        loss.backward()
    assert seen == [("all_reduce", (0,))]
    assert "_casts" not in w.__dict__  # dropped in its own backward: no cycle stays behind


@pytest.mark.ranks(4, pool=True)
def test_varying_keeps_the_gradient_pending() -> None:
    mesh = cached_mesh(4)
    w = distribute_tensor(_input((6, 6)), mesh, [Varying()]).requires_grad_()
    x = distribute_tensor(_input((8, 6)), mesh, [Shard(0)])
    loss = (x @ w).pow(2).sum()
    with collectives() as seen:
        loss.backward()
    assert seen == []
    assert w.grad.placements[0].is_partial()
    plain = _input((6, 6)).requires_grad_()
    (_input((8, 6)) @ plain).pow(2).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    for source, target in itertools.product(all_codes(2, 2), repeat=2):
        y = distribute_tensor(x, cached_mesh(2, 2), placements(source)).redistribute(placements(target))
        assert torch.equal(y.full_tensor().to(torch.complex64), x.to(torch.complex64))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.bfloat16, torch.complex128])
def test_sums_of_other_dtypes(dtype: torch.dtype) -> None:
    part = torch.arange(6).reshape(2, 3).to(dtype)
    mesh = cached_mesh(4)
    d = DTensor.from_local(part, mesh, placements("P"))
    for target in ("I", "S0", "S1"):
        y = d.redistribute(placements(target))
        assert y.dtype == dtype
        assert torch.equal(y.full_tensor(), part * 4)


@pytest.mark.ranks(4, pool=True)
def test_sums_that_are_strided_in_memory() -> None:
    part = torch.arange(36.0).reshape(6, 6).diagonal()
    d = DTensor.from_local(part, cached_mesh(4), placements("P"))
    assert torch.equal(d.redistribute(placements("S0")).full_tensor(), part * 4)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("target", ["I", "S1", "S0"])
@pytest.mark.parametrize("source", ["S0", "P"])
def test_conjugates_and_negatives_that_are_flags(source: str, target: str) -> None:
    x = torch.view_as_complex(torch.arange(64.0, dtype=torch.float64).view(8, 4, 2))
    ours = distribute_tensor(x, cached_mesh(4), placements(source))
    for fn in (torch.conj, lambda t: t.conj().imag, lambda t: torch._neg_view(t.real)):
        assert torch.equal(fn(ours).redistribute(placements(target)).full_tensor(), fn(x))
