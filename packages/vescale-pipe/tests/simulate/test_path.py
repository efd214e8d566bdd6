"""Critical paths: they add up to the makespan, and each step starts when the one before lets it."""

import itertools
import random

import pytest

from vescale_pipe._simulate import Costs, simulate

GPIPE = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def told(done):
    return [(step.rank, str(step.action), step.why, step.delay) for step in done.critical_path()]


def test_paths_worked_out_on_paper(written):
    # Through rank 1, which is never idle once it has begun.
    assert told(simulate(written("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), Costs(latency=0.5))) == [
        (0, "0F0", "first", 0),
        (1, "1F0", "message", 0.5),
        (1, "1B0", "rank", 0),
        (1, "1F1", "rank", 0),
        (1, "1B1", "rank", 0),
        (0, "0B1", "message", 0.5),
    ]
    # 1F1 starts at 4.5: its message stood behind that of 0F0, which left at 1.
    fifo = Costs(latency=0.5, bytes_per_second=2, message_bytes=3, link="fifo")
    assert told(simulate(written(*GPIPE), fifo)) == [
        (0, "0F0", "first", 0),
        (1, "1F1", "queue", 3.5),
        (1, "1B0", "rank", 0),
        (0, "0B0", "message", 2),
        (0, "0B1", "rank", 0),
    ]
    assert told(simulate(written("0F0 1F0", placement=[0, 0]))) == [(0, "0F0", "first", 0), (0, "1F0", "rank", 0)]


def test_a_message_that_finds_its_link_just_free_did_not_queue(written):
    fifo = Costs(forward=[1, 0.5], bytes_per_second=1, message_bytes=1, link="fifo")
    assert told(simulate(written(*GPIPE), fifo))[:3] == [
        (0, "0F0", "first", 0),
        (0, "0F1", "rank", 0),
        (1, "1F1", "message", 1),
    ]


def test_messages_that_take_no_time(written):
    assert told(simulate(written("0F0 2F0", "1F0", placement=[0, 1, 0]))) == [
        (0, "0F0", "first", 0),
        (1, "1F0", "message", 0),
        (0, "2F0", "message", 0),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_paths_add_up_to_the_makespan(random_schedule, random_costs, seed):
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    done = simulate(schedule, random_costs(draw, schedule), edges)
    steps = done.critical_path()
    assert steps[-1].end == done.makespan
    assert (steps[0].why, steps[0].start, steps[0].delay) == ("first", 0, 0)
    assert sum(step.delay + (step.end - step.start) for step in steps) == pytest.approx(done.makespan, abs=1e-9)
    times = {action: (a, b) for rank in range(schedule.num_ranks) for action, a, b in done.action_times(rank)}
    for before, step in itertools.pairwise(steps):
        assert times[step.action] == (step.start, step.end)
        assert step.rank == schedule.placement[step.action.stage]
        assert step.delay == step.start - before.end >= 0
        if step.why == "rank":
            assert (before.rank, step.delay) == (step.rank, 0)
            row = schedule.actions(step.rank)
            # Next to each other, up to the partners of joined pairs.
            assert 1 <= row.index(step.action) - row.index(before.action) <= 3
        else:
            assert before.rank != step.rank
            assert step.delay >= done.costs.latency - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_what_is_not_on_the_path_may_be_slower_at_no_price(random_schedule, random_costs, seed):
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    done = simulate(schedule, random_costs(draw, schedule), edges)
    on = {step.rank for step in done.critical_path() if step.end > step.start}
    gains = done.gains(50.0)
    assert set(gains) == set(range(schedule.num_ranks))
    for rank, gain in gains.items():
        assert gain >= -1e-9
        if rank not in on:
            assert gain == pytest.approx(0, abs=1e-9)
