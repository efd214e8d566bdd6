"""Schedules as columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe._schedule import Action, Columns, Kind, Schedule, parse_action
from vescale_pipe.errors import ScheduleError


def rows(*lines: str) -> list[list[Action]]:
    return [list(map(parse_action, line.split())) for line in lines]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_lists_are_given_back(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed)
    one = case.schedule()
    assert [list(one.actions(rank)) for rank in range(one.num_ranks)] == case.actions
    assert [(rank, index) for rank in range(one.num_ranks) for index in one.joined(rank)] == sorted(case.joined)
    assert one.num_actions == sum(map(len, case.actions))
    assert one.placement == tuple(case.placement)
    for rank in range(one.num_ranks):
        assert list(one.stages_of(rank)) == [s for s, owner in enumerate(case.placement) if owner == rank]
        assert all(isinstance(action.kind, Kind) for action in one.actions(rank))


def test_numbers() -> None:
    one = Schedule.of("v", [0, 1, 1, 0], 1, rows("0F0 3F0", "1F0 2F0"))
    assert (one.name, one.num_ranks, one.num_stages, one.num_microbatches, one.num_actions) == ("v", 2, 4, 1, 4)
    assert one.stages_of(0) == (0, 3)
    assert one.stages_of(1) == (1, 2)
    assert one.actions(1) is one.actions(1)


def test_columns() -> None:
    (columns,) = Schedule.of("x", [0], 2, rows("0F0 0F1 0I0 0W0 0B1"), [(0, 1)]).columns
    assert len(columns) == 5
    assert columns.kind.dtype == torch.uint8
    assert columns.kind.tolist() == [0, 0, 2, 3, 1]
    assert columns.stage.dtype == columns.microbatch.dtype == torch.int32
    assert columns.microbatch.tolist() == [0, 1, 0, 0, 1]
    assert columns.joined.tolist() == [False, True, False, False, False]


def test_equal() -> None:
    def make(name: str = "x", microbatches: int = 1, line: str = "0F0 0B0", joined: tuple[Any, ...] = ()) -> Schedule:
        return Schedule.of(name, [0], microbatches, rows(line), joined)

    assert make() == make(name="another name")
    assert make() != make(microbatches=2)
    assert make() != make(line="0B0 0F0")
    assert make() != make(line="0F0")
    assert make() != make(joined=((0, 0),))
    assert make() != Schedule.of("x", [0], 1, rows("0F0 0B0", ""))
    assert make() != "0F0 0B0"
    with pytest.raises(TypeError, match="unhashable"):
        hash(make())


def test_made_of_columns() -> None:
    empty = torch.zeros(0)
    one = Schedule("x", (0,), 1, (Columns(empty.byte(), empty.int(), empty.int(), empty.bool()),))
    assert one.actions(0) == ()
    assert one.joined(0) == ()
    assert one == Schedule.of("x", [0], 1, [[]])


@pytest.mark.parametrize("joined", [(0, 1), (0, -1), (1, 0), (-1, 0)])
def test_pairs_that_are_not_there(joined: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=f"joined: rank {joined[0]} has no actions {joined[1]} and"):
        Schedule.of("x", [0], 1, rows("0F0 0B0"), [joined])


@pytest.mark.parametrize("wrong", [Action(Kind.F, -1, 0), Action(Kind.F, 0, -1), Action(Kind.F, 0, 2**31)])
def test_numbers_beyond_32_bits(wrong: Action) -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, .*: stage and micro-batch must be from 0 to 2147483647"):
        Schedule.of("x", [0], 1, [[wrong]])
    assert Schedule.of("x", [0], 1, [[Action(Kind.F, 0, 2**31 - 1)]]).actions(0)[0].microbatch == 2**31 - 1
