"""The order in memory that a DTensor has on one device is kept, and all ranks see the same one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vescale_dtensor import DTensor, Partial, Shard, distribute_tensor, random_mode
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_dtensor._mesh import mesh_info
from vescale_dtensor._order import agreed_stride, in_order, keep_order, loses_order, ranks_may_differ
from vescale_dtensor._spec import spec_of
from vescale_dtensor.placements import I
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

FOUR = pytest.mark.ranks(4, pool=True)
WHOLE: dict[str, Callable[[], Tensor]] = {
    "permuted": lambda: torch.rand(5, 4, 3).permute(2, 0, 1),
    "transposed": lambda: torch.rand(6, 4, 3).transpose(0, 1),
    "channels_last": lambda: torch.rand(4, 6, 3, 2).to(memory_format=torch.channels_last),
    "usual": lambda: torch.rand(4, 6, 3),
}


def _window(whole: Tensor, x: DTensor) -> Tensor:
    for dim, (offset, size) in enumerate(zip(x.local_offset, x.local_shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


@FOUR
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("code", ["S0 I", "S1 S2", "I S1", "S2 S2", "S0 S1"])
def test_redistribution_keeps_it(code: str, name: str) -> None:
    mesh, value = cached_mesh(2, 2), WHOLE[name]()
    x = distribute_tensor(value, mesh, placements(code))
    assert x.stride() == value.stride()
    for target in ("I I", "S0 S1", "S1 I", "I S2", "S1 S1"):
        for y in (
            x.redistribute(placements=placements(target)),
            x.redistribute(placements=placements(target), async_op=True).wait(),
            distribute_tensor(value, mesh, placements(target), src_data_rank=0),
        ):
            assert y.stride() == value.stride(), target
            assert torch.equal(y.to_local(), _window(value, y))
    assert x.full_tensor().stride() == value.stride()


@FOUR
@pytest.mark.parametrize("name", WHOLE)
def test_reduction_keeps_it(name: str) -> None:
    value = WHOLE[name]()
    x = distribute_tensor(value, cached_mesh(4), [Partial()]).requires_grad_()
    for target in ("I", "S0"):
        y = x.redistribute(placements=placements(target))
        assert y.stride() == value.stride()
        assert torch.equal(y.detach().to_local(), _window(value, y))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad.full_tensor(), torch.ones_like(value))


@FOUR
def test_slices_of_a_sharded_dim_keep_it() -> None:
    value = torch.rand(6, 8).t()
    x = distribute_tensor(value, cached_mesh(4), [Shard(1)])
    with implicit_communication("allow"):
        y = x[:, :4]
    assert y.stride() == value[:, :4].stride() == (1, 8)
    assert torch.equal(y.full_tensor(), value[:, :4])


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.t(),
    "product": lambda x: x.t() * x.t(),
    "chain": lambda x: (x.t() + 1).relu().exp(),
    "out of graph": lambda x: (x.detach().t() + x.detach().t()).sigmoid(),
    "where": lambda x: torch.where(x.t() > 1, x.t(), x.t() * 2),
    "contiguous": lambda x: x.t().contiguous(),
    "clone": lambda x: x.t().clone(),
    "contiguous clone": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "double": lambda x: (x.t() + x.t()).double(),
    "like": lambda x: torch.zeros_like(x.t()),
    "3d": lambda x: (x.view(4, 2, 3).permute(2, 0, 1) + x.view(4, 2, 3).permute(2, 0, 1)).relu(),
    "images": lambda x: (x.view(4, 2, 3, 1) + 1).contiguous(memory_format=torch.channels_last),
}


@FOUR
@pytest.mark.parametrize("name", ROWS)
def test_one_row_per_rank(name: str) -> None:
    value = torch.arange(24.0).view(4, 6)
    plain = value.clone().requires_grad_()
    expected = ROWS[name](plain)
    x = distribute_tensor(value, cached_mesh(4), [Shard(0)]).requires_grad_()
    assert loses_order(x._spec)
    actual = ROWS[name](x)
    assert actual.stride() == expected.stride()
    assert torch.equal(actual.detach().full_tensor(), expected)
    if expected.requires_grad:
        (want,) = torch.autograd.grad(expected.sum(), plain)
        (got,) = torch.autograd.grad(actual.sum(), x)
        torch.testing.assert_close(got.full_tensor(), want)


@FOUR
def test_ranks_agree_where_some_see_less(rank: int) -> None:
    info = mesh_info(cached_mesh(4))
    uneven = spec_of(info, (5, 6), (0,))
    assert ranks_may_differ(uneven)
    seen = (1, 5) if rank == 0 else (6, 1)  # as if all others had forgotten
    assert agreed_stride(uneven, (1, uneven.local_shape[0]) if rank == 0 else seen) == (1, 5)
    for shape, types in (((8, 6), (0,)), ((4, 6), (0,)), ((5, 6), (I,)), ((5,), (0,)), ((5, 1), (0,)), ((7, 6), (1,))):
        assert ranks_may_differ(spec_of(info, shape, types)) == (shape == (7, 6))


@FOUR
@pytest.mark.parametrize("shape", [(5, 6), (6, 5), (3, 4), (4, 6), (2, 3, 5)], ids=str)
def test_draws_of_few_rows_in_whole_mode(shape: tuple[int, ...]) -> None:
    value = torch.rand(shape)
    for axes, codes in (((4,), ("S0", "S1")), ((2, 2), ("S0 S1", "S1 S0", "S0 S0"))):
        for code in codes:
            results = []
            for x in (value, distribute_tensor(value, cached_mesh(*axes), placements(code))):
                torch.manual_seed(3)
                with random_mode("whole"):
                    y = torch.nn.functional.dropout((x.transpose(0, -1) + 1).relu(), 0.5)
                    z = torch.nn.functional.dropout(y, 0.2).clone().normal_()
                results.append((z, torch.get_rng_state()))
            (expected, state), (actual, own_state) = results
            assert torch.equal(actual.full_tensor(), expected), (code, axes)
            assert torch.equal(state, own_state)


def test_copies_only_what_lies_otherwise() -> None:
    x = torch.rand(3, 4, 5)
    assert in_order(x, (3, 4, 5), (20, 5, 1)) is x
    assert in_order(x, (6, 4, 5), (1, 30, 6)).stride() == (1, 15, 3)
    assert torch.equal(in_order(x, (6, 4, 5), (1, 30, 6)), x)
    assert in_order(x, (3, 4, 5), (0, 5, 1)) is x  # expanded: no order
    row = torch.rand(1, 6)
    assert keep_order(row, [1.0, torch.rand(6).as_strided((1, 6), (1, 1))]).stride() == (1, 1)
    assert keep_order(row, [torch.rand(6)]) is row
