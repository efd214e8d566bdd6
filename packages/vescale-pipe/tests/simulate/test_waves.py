"""Scalar, waves and a naive search for the times agree to the last bit; no other times are better."""

import random

import pytest
import torch

from vescale_pipe._simulate import simulate


@pytest.mark.parametrize("seed", range(60))
def test_both_methods_give_the_times_of_the_naive_one(random_schedule, random_costs, naive, seed):
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    costs = random_costs(draw, schedule)
    expected = naive(schedule, costs, edges)
    for method in ("scalar", "waves"):
        done = simulate(schedule, costs, edges, method=method)
        found = {a: (start, end) for rank in range(schedule.num_ranks) for a, start, end in done.action_times(rank)}
        assert found == expected
        assert done.makespan == max(end for _, end in expected.values())


@pytest.mark.parametrize("seed", range(20))
def test_no_action_can_be_done_earlier(random_schedule, random_costs, naive, seed):
    """Any other times that respect the schedule are later or equal, for each action, and so is their makespan."""
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    costs = random_costs(draw, schedule)
    done = simulate(schedule, costs, edges)
    for _ in range(5):
        every = [action for rank in range(schedule.num_ranks) for action in schedule.actions(rank)]
        lazy = naive(schedule, costs, edges, {action: draw.choice([0.0, 0.0, 0.7]) for action in every}.__getitem__)
        for rank in range(schedule.num_ranks):
            assert all(start <= lazy[action][0] for action, start, _ in done.action_times(rank))
        assert done.makespan <= max(end for _, end in lazy.values())


@pytest.mark.parametrize("seed", range(10))
def test_times_grow_with_costs(random_schedule, random_costs, seed):
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    done = simulate(schedule, random_costs(draw, schedule), edges)
    slower = done.what_if(latency=done.costs.latency + 0.5, rank_speed=[v * 0.9 for v in done.costs.rank_speed])
    assert slower.makespan >= done.makespan
    assert all(bool((a <= b).all()) for a, b in zip(done.start, slower.start, strict=True))


def test_a_rank_without_actions_waits_for_nobody(written):
    schedule = written("0F0 0B0", "", placement=[0, 1][:1])
    for method in ("scalar", "waves"):
        done = simulate(schedule, method=method)
        assert torch.equal(done.end[0], torch.tensor([1.0, 3.0], dtype=torch.float64))
        assert done.busy == (3.0, 0.0)
