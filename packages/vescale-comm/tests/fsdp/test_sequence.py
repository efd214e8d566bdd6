"""The sequence of collectives that follows from what happened in a pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_comm._fsdp.sequence import steps_of


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, [0, 1, 2]),
        (1, [0, 1, 2]),
        (5, [0, 1, 2]),
    ],
)
def test_a_forward_is_gathered_in_order(ahead: int, expected: list[int]) -> None:
    assert steps_of([0, 1, 2], ahead)[0] == expected


def test_units_are_gathered_ahead() -> None:
    assert steps_of([0, 1, 2], 1)[1] == {0: (1, 2), 1: (2, 3), 2: (3, 3)}
    assert steps_of([0, 1, 2], 0)[1] == {0: (1, 1), 1: (2, 2), 2: (3, 3)}


def test_a_reduction_comes_before_what_is_gathered_after_it() -> None:
    assert steps_of([2, ~2, 1, ~1, 0, ~0], 0)[0] == [2, ~2, 1, ~1, 0, ~0]
    # The gather ahead of unit 1 goes out before unit 2 is complete.
    assert steps_of([2, ~2, 1, ~1, 0, ~0], 1)[0] == [2, 1, ~2, 0, ~1, ~0]


@st.composite
def passes(draw: st.DrawFn) -> list[int]:
    units = draw(st.permutations(range(draw(st.integers(1, 6)))))
    reduced = draw(st.permutations([~unit for unit in units]))
    events, left = [], list(reduced)
    for unit in units:
        events.append(unit)
        ready = [event for event in left if ~event in events]
        for event in ready:
            if draw(st.booleans()):
                events.append(event)
                left.remove(event)
    return events + left


@given(passes(), st.integers(0, 3))
def test_every_step_once_and_never_too_late(events: list[int], ahead: int) -> None:
    steps, until = steps_of(events, ahead)
    assert sorted(steps) == sorted(events)
    for unit, (before, after) in until.items():
        assert unit in steps[:before]
        assert before <= after
        # Nothing is begun before a unit is used but what comes earlier in the pass, and the units ahead of it.
        needs = [event for event in events if event >= 0]
        allowed = {*events[: events.index(unit)], *needs[: needs.index(unit) + 1 + ahead]}
        assert set(steps[:after]) <= allowed
