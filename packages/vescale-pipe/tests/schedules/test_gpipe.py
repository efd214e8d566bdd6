"""GPipe and LoopedBFS: order, bubble and memory."""

import pytest

from vescale_pipe._schedules import build_schedule
from vescale_pipe._schedules.gpipe import gpipe, looped_bfs


def text(schedule, rank):
    return " ".join(map(str, schedule.actions(rank)))


def test_all_forwards_come_before_all_backwards():
    schedule = gpipe(2, 3)
    assert text(schedule, 0) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert text(schedule, 1) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert (schedule.name, schedule.placement, schedule.num_microbatches) == ("gpipe", (0, 1), 3)


def test_a_chunk_is_through_before_the_next_begins_and_micro_batches_keep_their_order():
    schedule = looped_bfs(2, 2, 2)
    assert text(schedule, 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert text(schedule, 1) == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    assert schedule.placement == (0, 1, 0, 1)


def test_one_chunk_of_looped_bfs_is_gpipe():
    assert looped_bfs(3, 4, 1) == gpipe(3, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.5, 0.25), (3, 1, 2)])
def test_gpipe_idles_for_the_fill_and_drain_and_keeps_everything(oracle, ranks, f, i, w):
    for count in (1, 2, ranks, 2 * ranks + 1):
        run = oracle(gpipe(ranks, count), f, i, w)
        assert run.idle == pytest.approx([(ranks - 1) * (f + i + w)] * ranks)
        assert run.peak == [count] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 1, 2)])
def test_looped_bfs_divides_the_bubble_by_its_chunks_from_one_micro_batch_a_rank_on(oracle, ranks, chunks, f, i, w):
    for count in (ranks, ranks + 1, 2 * ranks + 1):
        run = oracle(looped_bfs(ranks, count, chunks), f / chunks, i / chunks, w / chunks)
        assert run.idle == pytest.approx([(ranks - 1) * (f + i + w) / chunks] * ranks)
        assert run.peak == [count * chunks] * ranks


def test_with_fewer_micro_batches_than_ranks_the_bubble_of_looped_bfs_is_larger(oracle):
    run = oracle(looped_bfs(4, 1, 2), 0.5, 0.5, 0.5)
    assert max(run.idle) > 3 * 3 / 2


def test_reversed_backwards_would_not_shorten_looped_bfs(oracle):
    ours = looped_bfs(3, 4, 2)
    rows = []
    for rank in range(3):
        actions = ours.actions(rank)
        rows.append([a if a.kind == 0 else a._replace(microbatch=3 - a.microbatch) for a in actions])
    reverse = type(ours).of("reverse", ours.placement, 4, rows)
    assert oracle(ours).makespan == oracle(reverse).makespan


def test_both_have_names():
    assert build_schedule("gpipe", 2, 3) == gpipe(2, 3)
    assert build_schedule("looped_bfs", 2, 3, chunks=3) == looped_bfs(2, 3, 3)
    assert build_schedule("looped_bfs", 2, 3) == looped_bfs(2, 3, 2)
