"""Plans of additions: chains, and what every plan must be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_comm.emulator import GlooOrder, NcclRing, NcclTree, Node, Order, Segment, chain, orders

ALL = [*orders.values(), NcclRing(channels=3, chunk_bytes=64), NcclTree(ranks_per_node=2)]


def ranks_of(node: Node) -> list[int]:
    """Return all ranks of a plan, depth first."""
    return [node.rank, *(rank for child in node.children for rank in ranks_of(child))]


@pytest.mark.parametrize("order", ALL, ids=repr)
@given(
    collective=st.sampled_from(["all_reduce", "reduce", "reduce_scatter"]),
    numel=st.integers(0, 3000),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 9).map(lambda half: 2 * half),
    root=st.integers(0, 17),
)
def test_every_element_is_reduced_once_and_every_rank_takes_part_once(order, collective, numel, itemsize, world, root):
    numel = numel // world * world if collective == "reduce_scatter" else numel
    at = 0
    for segment in order.segments(collective, numel, itemsize, world, root % world):
        assert segment.start == at
        assert sorted(ranks_of(segment.root)) == list(range(world))
        at = segment.stop
    assert at == numel


def test_a_chain_begins_with_the_innermost_rank():
    assert chain([2, 0, 1]) == Node(1, (Node(0, (Node(2),)),))
    with pytest.raises(ValueError, match="empty"):
        chain([])


def test_canonical_order_is_one_chain_through_the_ranks():
    assert orders["canonical"].segments("all_reduce", 10, 4, 3) == (Segment(0, 10, chain([0, 1, 2])),)


def test_the_base_has_no_plan_and_no_premultiplied_sum():
    with pytest.raises(NotImplementedError):
        Order().segments("all_reduce", 1, 4, 1)
    with pytest.raises(RuntimeError, match="gloo: this backend has no premul_sum"):
        GlooOrder().before([torch.ones(1)], "premul_sum", 2.0)
