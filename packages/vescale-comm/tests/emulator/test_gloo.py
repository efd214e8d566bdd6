"""The plan of gloo's ring against a ring in which messages travel, and against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_comm.emulator import GlooOrder, Segment, chain


def test_small_buffers_are_cut_in_two_pieces_per_rank():
    # 5 floats on 2 ranks: 4 pieces of at least 5 bytes, which are rounded up to 8; two pieces are 16 bytes.
    assert GlooOrder().segments("all_reduce", 5, 4, 2) == (
        Segment(0, 4, chain([1, 0])),
        Segment(4, 5, chain([0, 1])),
    )


def test_pieces_are_not_larger_than_one_mebibyte():
    # 10 MiB on 3 ranks: 10 pieces of 1 MiB, rounded up to 12 of 873,814 bytes, to 873,816; 4 pieces per rank.
    cuts = [(part.start, part.stop) for part in GlooOrder().segments("all_reduce", 10 << 18, 4, 3)]
    run = 4 * 873_816 // 4
    assert cuts == [(0, run), (run, 2 * run), (2 * run, 10 << 18)]


def test_a_reduce_to_one_rank_cuts_by_the_piece_and_not_by_their_number():
    # 7 MiB + 4 on 3 ranks: pieces of 1 MiB come first, so 8 of them, rounded up to 9; 3 per rank.
    numel = (7 << 18) + 1
    cuts = [(part.start, part.stop) for part in GlooOrder().segments("reduce", numel, 4, 3, 1)]
    assert cuts == [(0, 3 << 18), (3 << 18, 6 << 18), (6 << 18, numel)]
    assert cuts != [(part.start, part.stop) for part in GlooOrder().segments("all_reduce", numel, 4, 3)]


@given(world=st.integers(2, 7), numel=st.integers(1, 200))
def test_chains_are_what_travels_around_the_ring(world, numel):
    segments = GlooOrder().segments("all_reduce", numel, 4, world)
    # Rank r sends the run behind its own to rank r-1 first, then what it received, one run further each time.
    holds = {(rank, owner): [rank] for rank in range(world) for owner in range(world)}
    for hop in range(world - 1):
        sent = {(rank, (rank + 1 + hop) % world): holds[rank, (rank + 1 + hop) % world] for rank in range(world)}
        for (rank, owner), path in sent.items():
            holds[(rank - 1) % world, owner] = [*path, (rank - 1) % world]
    for segment in segments:
        owner = segment.root.rank
        assert segment.root == chain(holds[owner, owner])
        assert len(holds[owner, owner]) == world


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e5m2])
def test_dtypes_that_gloo_refuses(dtype):
    assert not GlooOrder().carries(dtype)
    assert GlooOrder().carries(torch.bfloat16)
