"""Interleaved 1F1B: order, bubble, memory, and numbers of micro-batches that do not divide."""

import pytest

from vescale_pipe._schedules.interleaved import interleaved_1f1b


def text(schedule, rank):
    return " ".join(map(str, schedule.actions(rank)))


def largest_round(ranks, count):
    return -(-count // max(1, count // ranks))


def test_the_order_is_megatrons():
    schedule = interleaved_1f1b(2, 4, 2)
    assert text(schedule, 0) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert text(schedule, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_rounds_are_of_nearly_equal_size_and_the_larger_ones_come_first():
    schedule = interleaved_1f1b(2, 5, 2)
    forwards = [a for a in schedule.actions(0) if a.kind == 0]
    assert " ".join(map(str, forwards)) == "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.5, 0.25), (3, 1, 2)])
def test_the_bubble_is_divided_by_the_chunks(oracle, ranks, chunks, f, i, w):
    for count in {ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 2}:
        run = oracle(interleaved_1f1b(ranks, count, chunks), f / chunks, i / chunks, w / chunks)
        assert run.idle == pytest.approx([(ranks - 1) * (f + i + w) / chunks] * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_memory_is_what_the_docstring_says(oracle, ranks, chunks):
    for count in range(1, 3 * ranks + 2):
        warm = (chunks - 1) * largest_round(ranks, count) + 1
        expected = [min(count * chunks, 2 * (ranks - 1 - rank) + warm) for rank in range(ranks)]
        assert oracle(interleaved_1f1b(ranks, count, chunks)).peak == expected


def test_with_fewer_micro_batches_than_ranks_the_bubble_is_larger(oracle):
    assert max(oracle(interleaved_1f1b(4, 3, 2), 0.5, 0.5, 0.5).idle) > 3 * 3 / 2
