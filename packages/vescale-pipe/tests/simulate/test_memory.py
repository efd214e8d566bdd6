"""Memory against a count action by action, and worked out on paper."""

import random

import pytest

from vescale_pipe._schedule import Action, Kind
from vescale_pipe._simulate import Costs, simulate


def recount(schedule, costs, rank):
    """Count what a rank keeps, one thing after another; return (most, index of the action)."""
    actions, joined = schedule.actions(rank), schedule.joined(rank)
    every = set(actions)
    keeps, level, most, index = {}, 0.0, 0.0, -1
    place = 0
    while place < len(actions):
        unit = range(place, place + (2 if place in joined else 1))
        for at in unit:
            kind, stage, m = actions[at]
            if kind == Kind.F:
                keeps[stage, m] = costs.activation[stage]
                level = sum(keeps.values())
                if level > most + 1e-12:
                    most, index = level, at
        for at in unit:
            kind, stage, m = actions[at]
            followed = any(Action(other, stage, m) in every for other in (Kind.B, Kind.I, Kind.W))
            if kind == Kind.I and Action(Kind.W, stage, m) in every:
                keeps[stage, m] = costs.kept_for_weights[stage]
            elif kind != Kind.F or not followed:
                del keeps[stage, m]
            level = sum(keeps.values())
            if level > most + 1e-12:
                most, index = level, at
        place = unit[-1] + 1
    assert not keeps
    return most, index


@pytest.mark.parametrize("seed", range(60))
def test_peaks_against_a_count(random_schedule, random_costs, seed):
    draw = random.Random(seed)
    schedule, edges = random_schedule(draw)
    costs = random_costs(draw, schedule)
    done = simulate(schedule, costs, edges)
    for rank, peak in enumerate(done.peaks):
        most, index = recount(schedule, costs, rank)
        assert peak.amount == pytest.approx(most, abs=1e-9)
        assert peak.index == index
        assert peak.action == (schedule.actions(rank)[index] if index >= 0 else None)
    assert done.peak == tuple(peak.amount for peak in done.peaks)


def test_an_input_gradient_frees_all_but_what_its_weights_need(written):
    schedule = written("0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2")
    done = simulate(schedule, Costs(activation=10, kept_for_weights=4))
    seconds, amount = done.kept(0)
    assert seconds.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9]
    assert amount.tolist() == [10, 10, 20, 20, 20, 14, 24, 24, 24, 18, 18, 14, 14, 10, 10, 4, 4, 0]
    peak = done.peaks[0]
    assert (peak.amount, peak.index, str(peak.action)) == (24, 3, "0F2")
    # By default all of it is kept until W.
    assert simulate(schedule, Costs(activation=10)).peak == (30,)


def test_what_no_backward_follows_is_not_kept(written):
    done = simulate(written("0F0 0F1 0F2"), Costs(activation=7))
    assert done.peak == (7,)
    assert done.kept(0)[1].tolist() == [7, 0, 7, 0, 7, 0]


def test_halves_without_the_other_half(written):
    # An I of a stage without weights frees all; so does a W of a stage whose inputs need no gradients.
    costs = Costs(activation=5, kept_for_weights=3)
    assert simulate(written("0F0 0I0 0F1 0I1"), costs).kept(0)[1].tolist() == [5, 5, 5, 0, 5, 5, 5, 0]
    assert simulate(written("0F0 0W0 0F1 0W1"), costs).kept(0)[1].tolist() == [5, 5, 5, 0, 5, 5, 5, 0]


def test_both_of_a_joined_pair_hold_their_memory(written):
    # The backward comes first in the list, but frees nothing before the pair ends.
    done = simulate(written("0F0 (0B0 0F1) 0B1"))
    assert done.peak == (2,)
    assert str(done.peaks[0].action) == "0F1"
    seconds, amount = done.kept(0)
    assert seconds.tolist() == [0, 1, 1, 1, 4, 4, 4, 6]
    assert amount.tolist() == [1, 1, 1, 2, 1, 1, 1, 0]


def test_a_rank_that_keeps_nothing(written):
    peak = simulate(written("0F0 0B0"), Costs(activation=0)).peaks[0]
    assert (peak.amount, peak.index, peak.action) == (0, -1, None)
