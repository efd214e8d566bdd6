"""Embedding lookups against one device, under every placement of indices and table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, check_op, compare, placements, random_codes

MESHES = [(4,), (2, 2)]


def _inputs(rows: int = 10, width: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(rows, (5, 3), generator=generator)
    return index, torch.randn(rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("rows", [10, 3, 1])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding_equals_one_device(rows: int, padding: int | None, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    args = _inputs(rows)
    for codes in random_codes(args, len(mesh_shape), seed=rows, count=25):
        with implicit_communication("allow"):
            check_op(lambda i, w: F.embedding(i, w, padding), args, codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("code", ["S0", "S1", "R", "I", "P"])
def test_native_embedding_and_module(code: str) -> None:
    mesh = cached_mesh(4)
    index, weight = _inputs()
    with implicit_communication("error"):
        check_op(lambda w, i: torch.embedding(w, i, 2), (weight, index), [code, "I"], mesh)
        check_op(lambda w, i: torch.embedding(w, i), (weight, index), [code, "R"], mesh)
    if code in "S0 S1 I":
        layer = torch.nn.Embedding(10, 6, padding_idx=4, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, placements(code)))
        compare(layer(distribute_tensor(index, mesh)).detach(), F.embedding(index, weight, 4))


@pytest.mark.ranks(4, pool=True)
def test_sharded_vocabulary_stays_pending_and_communicates_nothing() -> None:
    mesh = cached_mesh(2, 2)
    index, weight = _inputs(rows=7)
    with implicit_communication("error"):
        out = check_op(F.embedding, (index, weight), ["S0 I", "I S0"], mesh)
    assert out.placements == (Shard(0), Partial())


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("code", ["S0", "I"])
def test_index_outside_the_table_raises(bad: int, code: str) -> None:
    mesh = cached_mesh(4)
    _, weight = _inputs(rows=10)
    table = distribute_tensor(weight, mesh, placements(code))
    with pytest.raises(IndexError):
        F.embedding(distribute_tensor(torch.tensor([1, bad]), mesh), table)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", [["S0", "I"], ["I", "S1"], ["I", "S0"], ["S1", "R"]], ids=str)
def test_gradient_scaled_by_frequency(codes: list[str]) -> None:
    args = _inputs(rows=4)
    with implicit_communication("allow"):
        check_op(lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), args, codes, cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_max_norm_rewrites_a_replicated_table_and_refuses_a_sharded_one() -> None:
    mesh = cached_mesh(4)
    index, weight = _inputs()
    plain, ours = weight.clone(), distribute_tensor(weight, mesh)
    with implicit_communication("allow"):
        compare(
            F.embedding(distribute_tensor(index, mesh, [Shard(0)]), ours, max_norm=1.0),
            F.embedding(index, plain, max_norm=1.0),
        )
    compare(ours, plain)
    with pytest.raises(UnsupportedOperationError, match="Replicate"):
        F.embedding(distribute_tensor(index, mesh), distribute_tensor(weight, mesh, [Shard(0)]), max_norm=1.0)
    with pytest.raises(UnsupportedOperationError, match="sparse=False"):
        F.embedding(distribute_tensor(index, mesh), distribute_tensor(weight, mesh, [Shard(0)]), sparse=True)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("code", all_codes(2, 1))
@pytest.mark.parametrize("num", [-1, 12])
def test_one_hot(num: int, code: str) -> None:
    index, _ = _inputs()
    with implicit_communication("error"):
        check_op(lambda i: F.one_hot(i, num), (index,), [code], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_embedding_bag_falls_back() -> None:
    index, weight = _inputs()
    with implicit_communication("allow"):
        check_op(lambda i, w: F.embedding_bag(i, w, mode="sum"), (index, weight), ["S0", "S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_no_gradient_leaves_no_varying_result() -> None:
    mesh = cached_mesh(4)
    index, weight = _inputs()
    with torch.no_grad():
        out = F.embedding(distribute_tensor(index, mesh), distribute_tensor(weight, mesh))
    assert isinstance(out, DTensor)
    assert out.placements == (Replicate(),)
