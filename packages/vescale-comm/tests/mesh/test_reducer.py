"""Reductions over mesh axes, beside sums written out by hand."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist

from vescale_comm._mesh import MeshReducer, reduce_over
from vescale_comm._report import AxisCost, MeshCosts
from vescale_comm.emulator import emulate
from vescale_comm.errors import CommError
from vescale_testing import cached_mesh


def numbers(rank, numel=1000, dtype=torch.float32):
    """What a rank puts in: sums of these depend on the order."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(10.0 ** (rank % 3)).to(dtype)


def in_order(terms):
    return functools.reduce(torch.add, terms)


@pytest.mark.ranks(4)
def test_plans_differ_in_order_only(rank):
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    flat = in_order([numbers(r) for r in range(4)])
    by_axes = in_order([numbers(0) + numbers(1), numbers(2) + numbers(3)])
    assert not torch.equal(flat, by_axes)
    for kind in ("p2p", "shared", "native"):
        for plan, expected in (("flat", flat), ("axes", by_axes), ("nested", by_axes)):
            got = numbers(rank)
            reduce_over(got, mesh, ("dp", "tp"), transport=kind, order="canonical", plan=plan)
            assert torch.equal(got, expected), (kind, plan)
            got = numbers(rank, 7)  # not a multiple of the ranks
            reduce_over(got, mesh, (0, 1), transport=kind, order="canonical", plan=plan, divisor=3)
            torch.testing.assert_close(got, in_order([numbers(r, 7) for r in range(4)]) / 3)
    for axes, peers in (("dp", (rank % 2, rank % 2 + 2)), (1, (rank // 2 * 2, rank // 2 * 2 + 1)), ((), (rank,))):
        got = numbers(rank)
        reduce_over(got, mesh, axes, op="avg")
        assert torch.equal(got, in_order([numbers(r) for r in peers]) / len(peers))
    # A slice of the mesh is a new object, but shares groups and transports with the others.
    for _ in range(2):
        reduce_over(numbers(rank), mesh["tp"], 0)
    kept = mesh._vescale_comm.reducers
    assert len(kept) == len(set(map(id, kept.values()))) + 4  # each of the mesh by two keys, that of the slice by one
    for other in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert not other._vescale_comm.reducers


@pytest.mark.ranks(4)
def test_tensors_of_many_kinds_go_together(rank):
    mesh = cached_mesh(2, 2, names=("dp", "tp"))

    def make(r):
        return [
            torch.tensor(float(r + 1)),
            torch.arange(6.0).view(2, 3).t() * (r + 1),
            torch.full((3,), 2**r, dtype=torch.int64),
            torch.zeros(0),
            torch.full((2, 2), 1 + r + 1j, dtype=torch.complex64),
            torch.ones(4, dtype=torch.bfloat16),
            torch.full((10,), float(r))[2:8:2],
        ]

    tensors, leaf = make(rank), torch.ones(3, requires_grad=True)
    reduce_over([*tensors, leaf], mesh, (0, 1))
    for got, *terms in zip(tensors, *[make(r) for r in range(4)], strict=True):
        assert torch.equal(got, in_order(terms))
    assert tensors[1].stride() == (1, 3)
    assert leaf.requires_grad
    assert leaf.tolist() == [4.0] * 3
    small = torch.full((5,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    reduce_over(small, mesh, (0, 1), accumulate=torch.float32)
    assert small.tolist() == [torch.tensor(1 + 3 * 2.0**-9).to(torch.bfloat16).item()] * 5

    low, high = torch.tensor([float(rank), -rank, 5.0]), torch.tensor([rank == 2, False])
    if rank == 1:
        low[2] = float("nan")
    reduce_over(low, mesh, (0, 1), op="min")
    assert low[:2].tolist() == [0.0, -3.0]
    assert low[2].isnan()
    reduce_over(high, mesh, (0, 1), op="max")
    assert high.tolist() == [True, False]
    product = torch.tensor([rank + 2, -1])
    reduce_over(product, mesh, "tp", op="product")
    assert product.tolist() == [(2 * 3, 4 * 5)[rank // 2], 1]


@pytest.mark.ranks(4)
def test_what_is_under_way_may_be_waited_for_in_any_order(rank):
    reducer = MeshReducer(cached_mesh(2, 2, names=("dp", "tp")), transport="p2p")
    tensors = [torch.full((5000,), float(rank + 1)) for _ in range(6)]
    works = []
    for number, tensor in enumerate(tensors):
        plan = ("axes", "nested", "flat")[number % 3]
        works.append(reducer.all_reduce([tensor], (0, 1), plan=plan))
        if rank == number % 4:
            works[-1].wait()  # others go on, and begin what comes next before they wait for this one
        single = torch.ones(3)
        reducer.all_reduce([single], (1,)).wait() if number == 4 else None
    for number in [3, 0, 5, 1, 4, 2] if rank % 2 else range(6):
        works[number].wait()
        works[number].wait()
        assert tensors[number].tolist() == [10.0] * 5000
    large = torch.full((3,), float(rank))
    reducer.all_reduce([large], (0, 1), op="max").wait()
    assert large.tolist() == [3.0] * 3
    reducer.close()


def test_windows_of_what_is_no_sum(monkeypatch):
    monkeypatch.setattr("vescale_comm._mesh.reducer.ROOM", 64)

    def run(rank):
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        values = torch.arange(50.0).mul(rank - 2)
        reduce_over(values, mesh, ("tp", "dp"), op="max")
        total = numbers(rank, 11)
        reduce_over(total, mesh, ("tp", "dp"), plan="nested")
        return values, total

    rows = [in_order([numbers(3 * row + column, 11) for column in range(3)]) for row in range(2)]
    for values, total in emulate(run, 6):
        assert torch.equal(values, torch.arange(50.0) * 3)
        assert torch.equal(total, rows[0] + rows[1])


def test_three_axes_in_an_emulated_world():
    def run(rank):
        mesh = dist.init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pod", "dp", "tp"))
        found = {}
        for axes in (("pod", "tp"), ("pod", "dp", "tp")):
            for plan in ("flat", "axes", "nested"):
                found[axes, plan] = numbers(rank, 13)
                reduce_over(found[axes, plan], mesh, axes, plan=plan)
        return found

    ranks = torch.arange(12).view(2, 3, 2)
    for rank, found in enumerate(emulate(run, 12)):
        column = rank // 2 % 3
        peers = ranks[:, column].flatten().tolist()
        nested = [in_order([numbers(r, 13) for r in row.tolist()]) for row in ranks[:, column]]
        assert torch.equal(found[("pod", "tp"), "flat"], in_order([numbers(r, 13) for r in peers]))
        for plan in ("axes", "nested"):
            assert torch.equal(found[("pod", "tp"), plan], in_order(nested))
        pods = [in_order([in_order([numbers(int(r), 13) for r in row]) for row in pod]) for pod in ranks]
        assert torch.equal(found[("pod", "dp", "tp"), "flat"], in_order([numbers(r, 13) for r in range(12)]))
        for plan in ("axes", "nested"):
            assert torch.equal(found[("pod", "dp", "tp"), plan], in_order(pods))


@pytest.mark.ranks(2)
def test_errors_name_what_was_given(rank):
    mesh = cached_mesh(1, 2, names=("dp", "tp"))
    one = torch.ones(2)
    for arguments, text in (
        ({"axes": "pp"}, r"no axis 'pp'; it has 0 \('dp'\), 1 \('tp'\)"),
        ({"axes": 2}, "no axis 2"),
        ({"axes": (1, "tp")}, "'tp' is there twice"),
        ({"axes": 1, "op": "mean"}, "needs one of sum, avg.*got 'mean'"),
        ({"axes": 1, "plan": "tree"}, "plan: needs one of flat"),
        ({"axes": 1, "op": "max", "divisor": 2}, "only sums are divided"),
    ):
        with pytest.raises(ValueError, match=text):
            reduce_over(one, mesh, **arguments)
    with pytest.raises(ValueError, match=r"tensor 1 of shape \(3,\) holds truth values"):
        reduce_over([one, torch.ones(3, dtype=torch.bool)], mesh, 1)
    with pytest.raises(ValueError, match="no max"):
        reduce_over(torch.ones(1, dtype=torch.complex64), mesh, 1, op="max")
    with pytest.raises(CommError, match="is on meta, but the mesh is one of cpu"):
        reduce_over(torch.ones(1, device="meta"), mesh, 1)
    with pytest.raises(TypeError, match="needs a DeviceMesh"):
        reduce_over(one, dist.group.WORLD, 0)
    assert one.tolist() == [1.0, 1.0]
    # An axis of one rank adds nothing.
    reduce_over(one, mesh, "dp", op="avg")
    assert one.tolist() == [1.0, 1.0]
    reduce_over(one, mesh, ("dp", "tp"), op="avg", divisor=2)
    assert one.tolist() == [0.5, 0.5]


@pytest.mark.ranks(4)
def test_the_plan_is_chosen_by_bytes(rank):
    ring = AxisCost.of_link(alpha=1e-4, bandwidth=3e9)
    costs = MeshCosts({("dp",): ring, ("tp",): ring, ("dp", "tp"): AxisCost.of_link(alpha=1e-3, bandwidth=9e9)})
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    measured = MeshReducer(mesh, costs=costs)
    assert measured.plan_for(1000, (0, 1)) == "axes"
    assert measured.plan_for(64 << 20, ("dp", "tp")) == "flat"
    assert measured.plan_for(1000, "dp") == "flat"
    chosen = numbers(rank)
    measured.all_reduce([chosen], (0, 1)).wait()
    assert torch.equal(chosen, in_order([numbers(0) + numbers(1), numbers(2) + numbers(3)]))
    assert MeshReducer(mesh, transport="shared").plan_for(1000, (0, 1)) == "flat"
    measured.close()
