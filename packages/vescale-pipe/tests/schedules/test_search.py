"""The candidates of the search, and the bound that ends it."""

import itertools

import pytest

from vescale_pipe._schedules import build_schedule
from vescale_pipe._schedules._search import families, fingerprint, lower_bound, named, refilled
from vescale_pipe._schedules.registry import BUILT_IN
from vescale_pipe._simulate import Costs, simulate


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_all_schedules_with_a_name_take_part(chunks):
    names = {schedule.name for schedule in named(2, 4, chunks, Costs(), None)}
    loops = {"interleaved_1f1b", "looped_bfs", "interleaved_zb"}
    shapes = {"zb_v", "v_half", "v_min", "dualpipe_v"}
    expected = {1: set(BUILT_IN) - shapes, 2: loops | shapes, 3: loops}[chunks]
    assert names == expected


def test_the_family_has_the_schedules_with_a_name_in_it(checked):
    members = [member(4, 9, 1) for member in families()]
    for name in ("1f1b", "eager_1f1b", "zb_h1", "zb_h2"):
        assert build_schedule(name, 4, 9) in members
    for member in members:
        checked(member)


@pytest.mark.parametrize("chunks", [1, 2])
def test_nothing_is_below_the_bound(chunks):
    costs = Costs(forward=[1, 2, 3, 1] * chunks, input_grad=[2, 1, 1, 3] * chunks, weight_grad=1.0, latency=0.5)
    bound = lower_bound(4, 8, chunks, costs)
    times = [simulate(schedule, costs).makespan for schedule in named(4, 8, chunks, costs, None)]
    assert min(times) >= bound > max(times) / 2


def test_the_bound_is_met_where_no_rank_idles_once_it_has_begun():
    costs = Costs().divided(2)
    assert simulate(build_schedule("zb_v", 4, 8), costs).makespan == lower_bound(4, 8, 2, costs) == 25.5


def test_weight_gradients_that_are_placed_anew_make_1f1b_a_zero_bubble_schedule():
    one = build_schedule("1f1b", 4, 8)
    times = [simulate(schedule, Costs()).makespan for schedule in refilled(one, Costs(), None)]
    assert min(times) == simulate(build_schedule("zb_h1", 4, 8), Costs()).makespan == 27.0


def test_refilled_schedules_keep_within_memory():
    found = list(refilled(build_schedule("zb_h2", 4, 8), Costs(), 7.0))
    assert found
    assert all(max(simulate(schedule, Costs()).peak) <= 7 for schedule in found)
    assert list(refilled(build_schedule("gpipe", 4, 8), Costs(), 7.0)) == []


def test_fingerprints_tell_schedules_apart():
    some = [build_schedule(name, ranks, count) for name in BUILT_IN for ranks in (2, 3) for count in (2, 3, 4)]
    for one, other in itertools.combinations(some, 2):
        assert (fingerprint(one) == fingerprint(other)) == (one == other)
