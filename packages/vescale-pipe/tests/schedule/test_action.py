"""Actions and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._schedule import Action, Kind, parse_action
from vescale_pipe.errors import ScheduleError

NUMBERS = st.integers(0, 10**9 - 1)


@given(st.sampled_from(list(Kind)), NUMBERS, NUMBERS)
def test_text_is_read_back(kind: Kind, stage: int, microbatch: int) -> None:
    action = Action(kind, stage, microbatch)
    assert parse_action(str(action)) == action
    assert str(action) == f"{stage}{kind.name}{microbatch}"


def test_spaces_around_do_not_count() -> None:
    assert parse_action(" 12W3\n") == Action(Kind.W, 12, 3)


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0G0", "0f0", "0F0 0F1", "-1F0", "0F-1", "0F0x", "1.0F0", "\u0661F0", "1234567890F0"]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"expected a stage, one of F, B, I, W, and a micro-batch"):
        parse_action(text)


def test_actions_are_plain_keys() -> None:
    assert {Action(Kind.F, 0, 0): 1}[Action(Kind.F, 0, 0)] == 1
    assert sorted([Action(Kind.B, 0, 0), Action(Kind.F, 1, 0)])[0].kind is Kind.F
    assert [kind.name for kind in Kind] == list("FBIW")
    assert [int(kind) for kind in Kind] == [0, 1, 2, 3]
