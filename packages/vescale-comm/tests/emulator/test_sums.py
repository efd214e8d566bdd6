"""What backends compute, against sums written out by hand; against real gloo see test_run.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_comm._transport import add_in_order
from vescale_comm.emulator import (
    GlooOrder,
    NcclRing,
    NcclTree,
    all_reduce,
    all_reduce_coalesced,
    identify,
    orders,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)


def terms(world: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world, numel)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return list(values.to(dtype).unbind())


@given(st.integers(1, 9), st.integers(1, 50), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_canonical_sums_are_those_of_the_transports(world, numel, dtype):
    inputs = terms(world, numel, dtype=dtype)
    expected = torch.empty_like(inputs[0])
    add_in_order(inputs, expected, world)
    assert torch.equal(all_reduce(orders["canonical"], inputs, "avg"), expected)


def test_gloo_on_three_ranks_written_out():
    a, b, c = terms(3, 12)
    # Runs of 4 elements: run 0 is x[2], x[1], x[0]; run 1 is x[0], x[2], x[1]; run 2 is x[1], x[0], x[2].
    expected = torch.cat([a[:4] + (b[:4] + c[:4]), b[4:8] + (c[4:8] + a[4:8]), c[8:] + (a[8:] + b[8:])])
    assert torch.equal(all_reduce(GlooOrder(), [a, b, c]), expected)
    assert not torch.equal(expected, (a + b) + c)
    assert torch.equal(torch.cat(reduce_scatter_tensor(GlooOrder(), [a, b, c])), expected)


def test_a_tree_adds_what_its_children_bring_to_its_own_numbers():
    inputs = terms(4, 8)
    a, b, c, d = (tensor[:4] for tensor in inputs)
    # 0 - 2 - (1, 3)
    assert torch.equal(all_reduce(NcclTree(), inputs)[:4], a + ((c + b) + d))


def test_gloo_reduces_lists_one_by_one_and_coalesced_tensors_as_one():
    lists = [list(rank.split(5)) for rank in terms(3, 15)]
    one_by_one = [all_reduce(GlooOrder(), [rank[i] for rank in lists]) for i in range(3)]
    assert all(map(torch.equal, reduce_scatter(GlooOrder(), lists), one_by_one))
    joined = all_reduce(GlooOrder(), [torch.cat(rank) for rank in lists]).split(5)
    found = all_reduce_coalesced(GlooOrder(), lists)
    assert all(map(torch.equal, found, joined))
    assert not all(map(torch.equal, found, one_by_one))


def test_nccl_reduces_lists_as_one_and_coalesced_tensors_one_by_one():
    ring = NcclRing()
    lists = [list(rank.split(5)) for rank in terms(3, 15)]
    one_by_one = [all_reduce(ring, [rank[i] for rank in lists]) for i in range(3)]
    assert all(map(torch.equal, all_reduce_coalesced(ring, lists), one_by_one))
    joined = reduce_scatter_tensor(ring, [torch.cat(rank) for rank in lists])
    assert all(map(torch.equal, reduce_scatter(ring, lists), joined))


def test_gloo_leaves_what_passed_through_a_rank_in_its_buffer():
    a, b, c = terms(3, 6)
    found = reduce(GlooOrder(), [a, b, c], 0)
    whole = b[2:4] + (c[2:4] + a[2:4])
    assert torch.equal(found[0], torch.cat([a[:2] + (b[:2] + c[:2]), whole, c[4:] + (a[4:] + b[4:])]))
    assert torch.equal(found[1], torch.cat([b[:2] + c[:2], whole, b[4:]]))
    assert [tensor is None for tensor in reduce(NcclRing(), [a, b, c], 2)] == [True, True, False]


@pytest.mark.parametrize("order", orders.values(), ids=orders)
def test_shapes_dtypes_and_inputs_are_kept(order):
    inputs = [torch.ones(2, 3, dtype=torch.complex64) * (1 + 2j) for _ in range(2)]
    total = all_reduce(order, inputs)
    assert total.dtype == torch.complex64
    assert torch.equal(total, torch.full((2, 3), 2 + 4j))
    assert torch.equal(inputs[0], torch.full((2, 3), 1 + 2j))
    assert all_reduce(order, [torch.ones(0), torch.ones(0)]).shape == (0,)


def test_a_dtype_that_gloo_refuses_is_refused():
    with pytest.raises(RuntimeError, match=r"gloo: the collectives of this backend do not take torch\.int16"):
        all_reduce(GlooOrder(), [torch.ones(1, dtype=torch.int16)] * 2)


def test_orders_are_recognised_by_their_bits():
    inputs = terms(4, 1000)
    for name, order in orders.items():
        assert identify(list(orders.values()), inputs, all_reduce(order, inputs)) == [name]
    assert identify(list(orders.values()), inputs, inputs[0]) == []


def test_a_large_world_is_no_deep_recursion():
    inputs = [torch.ones(4)] * 3000
    assert all_reduce(orders["gloo"], inputs).tolist() == [3000.0] * 4
