"""The models of NCCL against small rings and trees drawn by hand."""

import pytest
import torch

from vescale_comm.emulator import NcclRing, NcclTree, Node, Segment, all_reduce, chain


def test_a_chunk_starts_behind_its_owner_and_travels_up():
    segments = NcclRing(channels=1).segments("all_reduce", 12, 4, 3)
    assert segments == (
        Segment(0, 4, chain([1, 2, 0])),
        Segment(4, 8, chain([2, 0, 1])),
        Segment(8, 12, chain([0, 1, 2])),
    )


def test_the_order_of_the_ring_is_a_parameter():
    segments = NcclRing(channels=1, ring=(2, 0, 1)).segments("all_reduce", 12, 4, 3)
    assert [segment.root.rank for segment in segments] == [2, 0, 1]
    with pytest.raises(ValueError, match="each rank of 3 once"):
        NcclRing(ring=(0, 1)).segments("all_reduce", 12, 4, 3)


def test_channels_and_loops_cut_the_buffer():
    segments = NcclRing(channels=2, chunk_bytes=16).segments("all_reduce", 36, 4, 2)
    # Each channel has 20 and 16 elements; a loop takes 4 for each of the 2 ranks, and the rest is cut at 4 as well.
    assert [(part.start, part.stop) for part in segments] == [
        (0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24), (24, 28), (28, 32), (32, 36)
    ]  # fmt: skip


def test_reduce_and_reduce_scatter_end_at_the_ranks_that_get_the_result():
    ring = NcclRing()
    assert ring.segments("reduce", 7, 4, 3, 1) == (Segment(0, 7, chain([2, 0, 1])),)
    assert [part.root.rank for part in ring.segments("reduce_scatter", 9, 4, 3)] == [0, 1, 2]
    assert NcclTree().segments("reduce", 7, 4, 3, 1) == ring.segments("reduce", 7, 4, 3, 1)


def test_an_average_is_divided_before_it_is_summed():
    terms = [torch.tensor([value]) for value in (3e38, 3e38)]
    assert all_reduce(NcclRing(), terms, "avg").item() == torch.tensor(3e38).item()
    counts = [torch.tensor([3]), torch.tensor([4])]
    assert all_reduce(NcclRing(), counts, "avg").item() == 3
    assert all_reduce(NcclTree(), terms, "premul_sum", 0.5).item() == torch.tensor(3e38).item()
    with pytest.raises(ValueError, match="premul_sum needs one"):
        all_reduce(NcclRing(), terms, "premul_sum")


def test_the_two_trees_of_eight_nodes():
    first, second = NcclTree().segments("all_reduce", 8, 4, 8)
    leaf = {rank: Node(rank) for rank in range(8)}
    # 0 - 4 - (2 - (1, 3), 6 - (5, 7)); the second tree is its mirror image.
    assert first.root == Node(0, (Node(4, (Node(2, (leaf[1], leaf[3])), Node(6, (leaf[5], leaf[7])))),))
    assert second.root == Node(7, (Node(3, (Node(5, (leaf[6], leaf[4])), Node(1, (leaf[2], leaf[0])))),))


def test_the_second_tree_of_five_nodes_is_shifted():
    first, second = NcclTree().segments("all_reduce", 8, 4, 5)
    assert first.root == Node(0, (Node(4, (Node(2, (Node(1), Node(3))),)),))
    assert second.root == Node(1, (Node(0, (Node(3, (Node(2), Node(4))),)),))


def test_ranks_of_a_node_are_a_chain_below_its_first():
    first, _ = NcclTree(ranks_per_node=2).segments("all_reduce", 8, 4, 4)
    assert first.root == Node(0, (Node(1), Node(2, (Node(3),))))
    with pytest.raises(ValueError, match="ranks_per_node: 2 does not divide the 3 ranks"):
        NcclTree(ranks_per_node=2).segments("all_reduce", 8, 4, 3)
