"""What is no schedule is told as that, by all that take one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import vescale_pipe as vp

TAKERS: list[Callable[[Any], Any]] = [
    vp.validate,
    vp.problems,
    vp.lower,
    vp.simulate,
    vp.render,
    vp.to_csv,
    vp.to_json,
    vp.forward_only,
]


@pytest.mark.parametrize("take", TAKERS, ids=lambda take: take.__name__)
def test_names_texts_and_other_things(take: Callable[[Any], Any]) -> None:
    name = take.__name__
    with pytest.raises(
        vp.ScheduleError, match=rf"{name}: '1f1b' is a name; build .* build_schedule\('1f1b', num_ranks"
    ):
        take("1f1b")
    with pytest.raises(vp.ScheduleError, match=f"{name}: a text was given; make a Schedule of it first, by from_csv"):
        take("0F0,0B0\n")
    with pytest.raises(vp.ScheduleError, match=f"{name}: a Schedule is needed, and a int was given; build_schedule"):
        take(7)


def test_arguments_in_the_wrong_order() -> None:
    schedule, costs = vp.build_schedule("1f1b", 2, 2), vp.Costs()
    with pytest.raises(vp.ScheduleError, match=r"the order is simulate\(schedule, costs\)"):
        vp.simulate(costs, schedule)  # type: ignore[arg-type]
    with pytest.raises(vp.ScheduleError, match=r"costs must be a Costs, such as Costs\(forward=1.0\), and 2 was given"):
        vp.simulate(schedule, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"path: costs were given in its place; .*render\(schedule, costs=...\)"):
        vp.render(schedule, costs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bars: 3 given; a Schedule, a Simulation or a list of Bar can be drawn"):
        vp.render([3])  # type: ignore[list-item]
    with pytest.raises(vp.ScheduleError, match=r"render: '1f1b' is a name"):
        vp.render("1f1b", costs=costs)  # type: ignore[arg-type]
    with pytest.raises(vp.ScheduleError, match=r"recheck: a Schedule was given.*recheck\(lower\(schedule\)\)"):
        vp.recheck(schedule)  # type: ignore[arg-type]
