"""Schedules that cannot be simulated: each is refused with the rank, the action and the rule."""

import re

import pytest
import torch

from vescale_pipe._schedule import Columns, Schedule
from vescale_pipe._simulate import simulate
from vescale_pipe.errors import ScheduleError


@pytest.mark.parametrize(
    ("lines", "placement", "message"),
    [
        (["0F0 0F0 0B0"], [0], "rank 0, action 0 (0F0): there is another one of its kind"),
        (["0F0 0B0 0I0"], [0], "rank 0, action 1 (0B0): there is another one of its kind"),
        (
            ["0F0 1F0 1B0 0B0", ""],
            [0, 1],
            "rank 0, action 1 (1F0): the schedule's placement gives its stage to another",
        ),
        (["0B0 0F0"], [0], "rank 0, action 0 (0B0): the forward of its stage and micro-batch does not come before"),
        (["0B0"], [0], "rank 0, action 0 (0B0): the forward of its stage and micro-batch does not come before"),
        (["(0F0 0B0)"], [0], "rank 0, action 1 (0B0): the forward of its stage and micro-batch does not come before"),
        (["0F0 0W0 0I0"], [0], "rank 0, action 1 (0W0): of its stage and micro-batch there is an I"),
        (["0F0 0B0 0W0"], [0], "rank 0, action 2 (0W0): of its stage and micro-batch there is an I"),
        (
            ["", "1F0 1F1"],
            [0, 1],
            "rank 1, action 0 (1F0): it takes what 0F0 gives, which no rank does (1 more like it)",
        ),
    ],
)
def test_the_first_action_that_breaks_a_rule_is_named(written, lines, placement, message):
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        simulate(written(*lines, placement=placement))
    assert "validate(schedule) tells all problems" in str(error.value)


def rows(kind, stage, microbatch, joined):
    return Columns(
        torch.tensor(kind, dtype=torch.uint8),
        torch.tensor(stage, dtype=torch.int32),
        torch.tensor(microbatch, dtype=torch.int32),
        torch.tensor(joined),
    )


@pytest.mark.parametrize(
    ("some", "message"),
    [
        (([0, 0], [0, 1], [0, 0], [False, False]), "action 1 (1F0): there are stages 0 to 0, micro-batches 0 to 0"),
        (([0, 0], [0, 0], [0, 1], [False, False]), "action 1 (0F1): there are stages 0 to 0, micro-batches 0 to 0"),
        (([0, 4], [0, 0], [0, 0], [False, False]), "action 1 (0?0): there are stages 0 to 0, micro-batches 0 to 0"),
        (([0, 1], [0, 0], [0, 0], [False, True]), "action 1 (0B0): it is joined"),
        (([0, 2, 3], [0, 0, 0], [0, 0, 0], [True, True, False]), "action 0 (0F0): it is joined"),
    ],
)
def test_columns_that_make_no_sense(some, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        simulate(Schedule("strange", (0,), 1, (rows(*some),)))


def test_a_pair_does_not_reach_into_the_next_rank():
    first, second = rows([0], [0], [0], [True]), rows([0], [1], [0], [False])
    with pytest.raises(ScheduleError, match="it is joined"):
        simulate(Schedule("strange", (0, 1), 1, (first, second)))
