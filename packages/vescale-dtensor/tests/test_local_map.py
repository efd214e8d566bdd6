"""`local_map` against the same function on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import Partial, Replicate, Shard, Varying, distribute_tensor
from vescale_dtensor._local_map import local_map
from vescale_dtensor.errors import MeshMismatchError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements

RANKS = pytest.mark.ranks(4, pool=True)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@RANKS
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_rows_with_a_replicated_weight(rows: int) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.cumsum(x @ w, 1)

    mapped = local_map(plain, [Shard(0), Replicate()], [[Shard(0), Replicate()], [Replicate(), Replicate()]])
    for w_code in ("I I", "R I", "R R"):
        check_op(_switch(plain, mapped), [data(rows, 3), data(3, 4, seed=1)], ["S0 I", w_code], mesh)


def _switch(plain: object, mapped: object):  # type: ignore[no-untyped-def]
    from vescale_dtensor import DTensor

    return lambda *a: (mapped if isinstance(a[0], DTensor) else plain)(*a)  # type: ignore[operator]


@RANKS
def test_results_that_are_pending_sums_and_several_results() -> None:
    mesh = cached_mesh(4, names=("tp",))

    def plain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, y * 2

    mapped = local_map(plain, ([Partial()], [Shard(0)]))
    check_op(_switch(plain, mapped), [data(3, 8), data(8, 4, seed=1)], ["S1", "S0"], mesh)


@RANKS
@pytest.mark.parametrize("result", [Replicate(), Varying()], ids=repr)
def test_a_function_that_communicates(result: Replicate) -> None:
    mesh = cached_mesh(4, names=("tp",))

    class Sum(torch.autograd.Function):  # a sum over ranks whose gradient arrives whole, or in parts
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, group=mesh.get_group())
            return x

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            if isinstance(result, Varying):
                g = g.clone()
                dist.all_reduce(g, group=mesh.get_group())
            return g

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sum(0)

    mapped = local_map(lambda x, w: Sum.apply((x @ w).sum(0)), [result], [[Shard(0)], [Replicate()]])
    check_op(_switch(plain, mapped), [data(8, 3), data(3, 4, seed=1)], ["S0", "I"], mesh)


@RANKS
def test_redistribution_of_inputs() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(data(8, 4), mesh, [Shard(1)])
    wants_rows = local_map(torch.cumsum, [Shard(0)], [[Shard(0)], None])
    with pytest.raises(
        ValueError, match=r"in_placements\[0\] is \(S\(0\)\), but the argument of cumsum is \[8, 4\]\(S\(1\)\)"
    ):
        wants_rows(x, 1)
    moved = local_map(torch.cumsum, [Shard(0)], [[Shard(0)], None], redistribute_inputs=True)(x, 1)
    torch.testing.assert_close(moved.full_tensor(), data(8, 4).cumsum(1))


@RANKS
def test_errors_and_plain_calls() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(data(8, 4), mesh, [Shard(0)])
    assert torch.equal(local_map(torch.neg, [Shard(0)])(data(3)), -data(3))
    with pytest.raises(ValueError, match="gave 1 results, but out_placements has 2 entries"):
        local_map(torch.neg, ([Shard(0)], [Shard(0)]))(x)
    with pytest.raises(ValueError, match="got 1 arguments, but in_placements has 2 entries"):
        local_map(torch.neg, [Shard(0)], [[Shard(0)], None])(x)
    with pytest.raises(ValueError, match=r"in_placements\[1\] .* is a int; give None for it"):
        local_map(torch.cumsum, [Shard(0)], [[Shard(0)], [Shard(0)]])(x, 1)
    with pytest.raises(ValueError, match=r"in_placements\[0\] is None, but argument 0 of neg is a DTensor"):
        local_map(torch.neg, [Shard(0)], [None])(x)
    with pytest.raises(ValueError, match=r"out_placements\[0\] = .* that result is a int"):
        local_map(lambda t: 3, [Shard(0)])(x)
    with pytest.raises(MeshMismatchError, match="argument 0 of neg lies on"):
        local_map(torch.neg, [Shard(0)], [[Shard(0)]], cached_mesh(2, 2))(x)
    assert local_map(lambda t: t.shape[0], None)(x) == 2
    assert local_map(lambda t: t, [Shard(0)])(x).placements == tuple(placements("S0"))
