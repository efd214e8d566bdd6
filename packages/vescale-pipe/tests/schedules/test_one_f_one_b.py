"""1F1B and eager 1F1B: order, bubble, memory, and what latency does to them."""

import pytest

from vescale_pipe._schedules.one_f_one_b import eager_1f1b, one_f_one_b


def text(schedule, rank):
    return " ".join(map(str, schedule.actions(rank)))


def test_the_order_is_that_of_the_paper():
    schedule = one_f_one_b(3, 4)
    assert text(schedule, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text(schedule, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert text(schedule, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_the_eager_form_has_twice_the_forwards_in_advance():
    schedule = eager_1f1b(3, 6)
    assert text(schedule, 0) == "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5"
    assert text(schedule, 1) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"


def test_fewer_micro_batches_than_ranks_are_all_forwards_first_on_the_first_rank():
    assert text(one_f_one_b(4, 2), 0) == "0F0 0F1 0B0 0B1"
    assert text(one_f_one_b(4, 2), 3) == "3F0 3B0 3F1 3B1"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.5, 0.25), (3, 1, 2)])
def test_both_idle_like_gpipe_at_bounded_memory(oracle, ranks, f, i, w):
    for count in (1, 2, ranks, 2 * ranks + 1):
        plain, eager = oracle(one_f_one_b(ranks, count), f, i, w), oracle(eager_1f1b(ranks, count), f, i, w)
        assert plain.idle == pytest.approx([(ranks - 1) * (f + i + w)] * ranks)
        assert eager.idle == pytest.approx([(ranks - 1) * (f + i + w)] * ranks)
        assert plain.peak == [min(count, ranks - rank) for rank in range(ranks)]
        assert eager.peak == [min(count, 2 * (ranks - 1 - rank) + 1) for rank in range(ranks)]


@pytest.mark.parametrize("latency", [0.125, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_latency_slows_every_micro_batch_of_1f1b_and_none_of_the_eager_form(oracle, ranks, latency):
    # Round trips over all ranks bind, so only whole rounds of micro-batches can be compared.
    few, many = 4 * ranks, 5 * ranks
    plain = [oracle(one_f_one_b(ranks, count), latency=latency).makespan for count in (few, many)]
    eager = [oracle(eager_1f1b(ranks, count), latency=latency).makespan for count in (few, many)]
    assert plain[1] - plain[0] == pytest.approx(ranks * 3 + 2 * latency * (ranks - 1))
    assert eager[1] - eager[0] == pytest.approx(ranks * 3)


def test_the_eager_form_slows_down_too_if_messages_take_longer_than_half_a_micro_batch(oracle):
    assert oracle(eager_1f1b(4, 20), latency=2).makespan - oracle(eager_1f1b(4, 16), latency=2).makespan > 12
