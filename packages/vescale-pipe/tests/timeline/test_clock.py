"""Clocks with known errors are read within the bound that is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.clock import estimate, partners

Delays = st.tuples(st.integers(1, 1_000_000), st.integers(0, 100_000), st.integers(1, 1_000_000))


@given(st.integers(-(10**15), 10**15), st.lists(Delays, min_size=1, max_size=20))
def test_the_offset_is_within_its_bound(truth: int, delays: list[tuple[int, int, int]]) -> None:
    pings, now = [], 0
    for there, inside, back in delays:
        arrived = now + there
        answered = arrived + inside
        pings.append((now, arrived + truth, answered + truth, answered + back))
        now = answered + back + 10
    offset, bound = estimate(pings)
    assert abs(offset - truth) <= bound
    # Never worse than half of the fastest round trip, which is what one ping can tell.
    assert bound <= min(there + back for there, _, back in delays) / 2 + 2


def test_pings_in_which_one_way_is_slow_at_a_time_tell_more_together() -> None:
    # 1 us there and 1.4 us back, then 1.4 us there and 1 us back: either alone leaves 1.2 us.
    offset, bound = estimate([(0, 1000, 1000, 2400), (10_000, 11_400, 11_400, 12_400)])
    assert offset == 0
    assert bound == 1001


def test_a_slow_ping_is_left_out() -> None:
    # While the slow one was under way, the other clock was set by a second.
    offset, bound = estimate([(0, 100, 100, 200), (300, 1_000_000_400, 1_000_000_400, 10_000)])
    assert abs(offset) <= bound <= 101


def test_a_clock_that_was_set_between_two_pings_is_read_by_the_faster_one() -> None:
    offset, bound = estimate([(0, 100, 100, 200), (300, 5380, 5380, 460)])
    assert abs(offset - 5000) <= bound <= 81


def test_there_must_be_a_ping() -> None:
    with pytest.raises(ValueError, match="never read"):
        estimate([])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 1000])
def test_ranks_make_a_tree_and_meet_in_one_order(count: int) -> None:
    plans = [partners(place, count) for place in range(count)]
    depth = [0] * count
    for place, plan in enumerate(plans):
        roles = [role for role, _ in plan]
        # Each but the first reads one clock, last of all: its parent's.
        assert roles == ["parent"] * (len(plan) - (place > 0)) + ["child"] * (place > 0)
        if place:
            parent = plan[-1][1]
            assert parent < place
            assert ("parent", place) in plans[parent]
            depth[place] = depth[parent] + 1
    assert max(depth) <= (count - 1).bit_length()
    # Blocking meetings in these orders all take place.
    done = [0] * count
    moved = True
    while moved:
        moved = False
        for place, plan in enumerate(plans):
            if done[place] < len(plan):
                _, other = plan[done[place]]
                if done[other] < len(plans[other]) and plans[other][done[other]][1] == place:
                    done[place] += 1
                    done[other] += 1
                    moved = True
    assert done == [len(plan) for plan in plans]
