"""What follows from the times: the two bubbles, and what would be if."""

import pytest
import torch

from vescale_pipe._simulate import Costs, simulate

ONE_F_ONE_B = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_the_two_bubbles(written):
    # ZB-H2 for two ranks: rank 1 starts 1 later and ends 1 later; neither idles in between.
    schedule = written("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2")
    done = simulate(schedule)
    assert done.makespan == 10
    assert done.busy == (9, 9)
    assert done.spans == (9, 9)
    assert done.bubble == pytest.approx(1 / 10)
    assert done.own_bubble == 0
    assert str(done) == "written: 2 ranks, 3 micro-batches, makespan 10, bubble 10.0% (own span 0.0%), peak 3"


def test_the_longest_own_span_counts(written):
    # Spans 5 and 2, busy 2 and 2: 1 - 4 / 10.
    done = simulate(written("0F0 0W0", "1F0 1B0"), Costs(backward=1, input_grad=0.5, weight_grad=1, latency=1))
    assert done.spans == (6, 2)
    assert done.busy == (2, 2)
    assert done.makespan == 6
    assert done.own_bubble == done.bubble == pytest.approx(1 - 4 / 12)


def test_overlap_counts_once_as_busy(written):
    done = simulate(written("0F0 (0F1 0B0) 0B1"), Costs(overlap=1.0))
    assert done.busy == (5,)
    assert done.bubble == 0


def test_what_if(written):
    schedule = written(*ONE_F_ONE_B)
    done = simulate(schedule)
    assert done.what_if(faster={1: 100}).makespan == simulate(schedule, Costs(rank_speed=[1, 2])).makespan == 6.5
    assert done.what_if(latency=0.5).makespan == 10
    assert done.what_if(latency=0.5, faster={1: 100}).costs == Costs(latency=0.5, rank_speed=[1, 2])
    # Rank 0 twice as fast: rank 1 works from 0.5 to 6.5, and the last backward then takes 1.
    assert done.gains(100) == {0: 1.5, 1: 2.5}
    assert done.gains(100, [1]) == {1: 2.5}
    with pytest.raises(ValueError, match=r"\['speed'\] given"):
        done.what_if(speed=2)
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        done.what_if(faster={2: 10})


def test_what_if_keeps_durations_and_edges(written):
    schedule = written("0F0 0B0", "1F0 1B0", "2F0 2B0")
    durations = [torch.tensor([1.0, 2.0])] * 2 + [torch.tensor([4.0, 2.0])]
    done = simulate(schedule, edges=[(0, 1), (0, 2)], durations=durations)
    assert done.makespan == 9
    assert done.what_if(faster={2: 100}).makespan == 6
    assert done.what_if(latency=1.0).makespan == 11
    with pytest.raises(ValueError, match="the durations of actions are known"):
        done.what_if(forward=2.0)
