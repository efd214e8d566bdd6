"""ZB-V: order, bubble and memory."""

import pytest

from vescale_pipe._schedules.v_shape import zb_v


def test_the_first_rank_holds_the_first_and_the_last_stage():
    schedule = zb_v(2, 4)
    assert schedule.placement == (0, 1, 1, 0)
    row = " ".join(map(str, schedule.actions(1)))
    assert row == ("1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_no_rank_idles_once_it_has_begun(oracle, ranks):
    for count in (2 * ranks, 2 * ranks + 1, 3 * ranks + 2):
        run = oracle(zb_v(ranks, count))
        assert run.own == [0.0] * ranks
        assert run.idle == [ranks - 1.0] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_memory_is_that_of_1f1b(oracle, ranks):
    for count in range(1, 3 * ranks):
        assert max(oracle(zb_v(ranks, count)).peak) == min(2 * count, 2 * ranks)


def test_with_few_micro_batches_there_is_a_bubble(oracle):
    assert max(oracle(zb_v(4, 4)).own) > 0
