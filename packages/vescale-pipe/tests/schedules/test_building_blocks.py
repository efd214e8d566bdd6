"""V-Half and V-Min: memory and bubble."""

import pytest

from vescale_pipe._schedules.building_blocks import v_half, v_min

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("ranks", RANKS)
def test_memory_stays_under_half_and_a_third_of_that_of_1f1b_and_one(oracle, ranks):
    for count in (1, 2, ranks, 3 * ranks):
        assert max(oracle(v_half(ranks, count)).peak) <= 2 * (ranks // 2 + 1)
        assert max(oracle(v_min(ranks, count)).peak) <= 2 * ((ranks + 1) // 3 + 1)


@pytest.mark.parametrize("ranks", RANKS[2:])
def test_v_half_idles_half_as_long_as_1f1b(oracle, ranks):
    for count in (ranks, 2 * ranks + 1, 4 * ranks):
        run = oracle(v_half(ranks, count))
        assert max(run.idle) == 3 * ranks - 4
        assert max(run.idle) < 6 * (ranks - 1) / 2


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_v_min_idles_two_thirds_as_long_as_1f1b(oracle, ranks):
    for count in (ranks, 2 * ranks + 1, 4 * ranks):
        assert max(oracle(v_min(ranks, count)).idle) == (4 * ranks - 5 if ranks % 3 else 4 * ranks - 3)


def test_one_rank_never_idles(oracle):
    assert oracle(v_half(1, 5)).idle == oracle(v_min(1, 5)).idle == [0.0]
