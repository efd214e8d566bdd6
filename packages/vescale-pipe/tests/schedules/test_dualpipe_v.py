"""DualPipeV: joined pairs, bubble and memory."""

import pytest

from vescale_pipe._schedule import Kind
from vescale_pipe._schedules.dualpipe_v import dualpipe_v


def test_the_steady_phase_joins_forwards_and_backwards_of_different_micro_batches():
    schedule = dualpipe_v(2, 6)
    for rank in range(2):
        actions, pairs = schedule.actions(rank), schedule.joined(rank)
        assert len(pairs) == 2 * (6 - 4 + rank + 1) + (1 - rank)
        for index in pairs:
            first, second = actions[index : index + 2]
            assert (first.kind, second.kind) == (Kind.F, Kind.B)
            assert first.microbatch > second.microbatch
            assert first.stage != second.stage


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1, 0.5), (0.5, 1, 1), (1, 2, 1)])
def test_the_bubble_is_the_papers_with_costs_of_a_chunk(oracle, ranks, overlap, f, i, w):
    pair = max(f, i + w) + (1 - overlap) * min(f, i + w)
    for count in (2 * ranks, 2 * ranks + 1, 3 * ranks):
        run = oracle(dualpipe_v(ranks, count), f, i, w, overlap=overlap)
        assert max(run.idle) == pytest.approx((ranks - 1) * (pair + i + w - 3 * w))


def test_long_forwards_or_weight_gradients_make_it_longer(oracle):
    for f, i, w in [(1.5, 1, 1), (1, 1, 1.5)]:
        assert max(oracle(dualpipe_v(3, 8), f, i, w).idle) > 2 * (f + i + w + i + w - 3 * w)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_memory_is_that_of_1f1b_and_half_an_activation(oracle, ranks):
    for count in range(1, 3 * ranks):
        assert max(oracle(dualpipe_v(ranks, count)).peak) <= 2 * ranks + 1


def test_fewer_micro_batches_leave_the_others_out():
    few, many = dualpipe_v(3, 4), dualpipe_v(3, 6)
    for rank in range(3):
        assert few.actions(rank) == tuple(a for a in many.actions(rank) if a.microbatch < 4)
