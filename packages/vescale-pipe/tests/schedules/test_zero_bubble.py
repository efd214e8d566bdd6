"""ZB-H1, ZB-H2 and the interleaved ZB-H1: order, bubble and memory."""

import pytest

from vescale_pipe._schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2

SHORT_WEIGHTS = [(1, 1, 1), (1, 1.5, 0.25), (3, 1, 1), (1, 1, 0.5), (1.25, 1.25, 1.25)]
"""(F, I, W) with W <= F, I."""


def text(schedule, rank):
    return " ".join(map(str, schedule.actions(rank)))


def test_weight_gradients_of_zb_h1_wait_for_as_many_micro_batches_as_ranks_are_before():
    schedule = zb_h1(3, 4)
    assert text(schedule, 0) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert text(schedule, 2) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_zb_h2_doubles_both():
    assert text(zb_h2(2, 3), 0) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert text(zb_h2(2, 4), 1) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), SHORT_WEIGHTS)
def test_zb_h1_idles_for_the_fill_less_the_weight_gradients(oracle, ranks, f, i, w):
    for count in (ranks, ranks + 1, 3 * ranks):
        run = oracle(zb_h1(ranks, count), f, i, w)
        assert run.idle == pytest.approx([(ranks - 1) * (f + i - w)] * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_zb_h1_has_the_memory_of_1f1b_on_all_ranks(oracle, ranks):
    for count in range(1, 2 * ranks + 2):
        assert oracle(zb_h1(ranks, count)).peak == [min(count, ranks)] * ranks


def test_long_weight_gradients_delay_zb_h1(oracle):
    assert max(oracle(zb_h1(3, 6), 1, 1, 2).idle) > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), SHORT_WEIGHTS)
def test_the_longest_idle_time_within_a_rank_of_zb_h2(oracle, ranks, f, i, w):
    for count in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        run = oracle(zb_h2(ranks, count), f, i, w)
        assert max(run.own) == pytest.approx((ranks - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_zb_h2_with_equal_costs_idles_only_before_a_rank_begins(oracle, ranks):
    for count in (2 * ranks - 1, 3 * ranks):
        run = oracle(zb_h2(ranks, count))
        assert run.own == [0.0] * ranks
        assert run.idle == [ranks - 1.0] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_zb_h2_has_twice_the_memory(oracle, ranks):
    for count in range(1, 3 * ranks):
        assert max(oracle(zb_h2(ranks, count)).peak) == min(count, 2 * ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("f", "i", "w"), SHORT_WEIGHTS)
def test_the_interleaved_form_divides_the_bubble(oracle, ranks, chunks, f, i, w):
    for count in {ranks, ranks + 1, 2 * ranks, 3 * ranks + 2}:
        run = oracle(interleaved_zb(ranks, count, chunks), f / chunks, i / chunks, w / chunks)
        assert run.idle == pytest.approx([(ranks - 1) * (f + i - w) / chunks] * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_interleaved_form_needs_the_same_memory_on_all_ranks(oracle, ranks, chunks):
    for count in range(1, 3 * ranks + 2):
        round_size = -(-count // max(1, count // ranks))
        expected = min(count * chunks, (chunks - 1) * round_size + ranks)
        assert oracle(interleaved_zb(ranks, count, chunks)).peak == [expected] * ranks


def test_one_chunk_of_the_interleaved_form_is_zb_h1():
    assert interleaved_zb(4, 9, 1) == zb_h1(4, 9)
