"""Schedules in which ranks wait for each other: the error tells who waits for what."""

import pytest

from vescale_pipe._simulate import Costs, simulate
from vescale_pipe.errors import ScheduleError


@pytest.mark.parametrize("method", ["scalar", "waves"])
@pytest.mark.parametrize("link", ["free", "fifo"])
def test_the_circle_of_waits_is_told(written, method, link):
    # Rank 2 only waits for the circle of the others.
    schedule = written("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1")
    with pytest.raises(ScheduleError) as error:
        simulate(schedule, Costs(link=link), method=method)
    assert str(error.value) == (
        "the schedule does not go on: rank 1 waits at 1B0 for 2B0 of rank 2; rank 2 waits at 2F1 for 1F1 of rank 1. "
        "Change the order of one of these ranks."
    )


def test_what_has_come_already_is_not_waited_for(written):
    schedule = written("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", "2F0 2B0 2F1 2B1")
    with pytest.raises(ScheduleError) as error:
        simulate(schedule, edges=[(0, 1), (0, 2), (1, 2)])
    assert "rank 1 waits at 1B1 for 2B1 of rank 2; rank 2 waits at 2F0 for 1F0 of rank 1." in str(error.value)


@pytest.mark.parametrize("method", ["scalar", "waves"])
def test_a_rank_that_waits_for_itself(written, method):
    with pytest.raises(ScheduleError, match="rank 0 waits at 1F0 for 0F0 of rank 0"):
        simulate(written("1F0 0F0", placement=[0, 0]), method=method)


def test_a_long_circle_is_cut_short(written):
    lines = [f"{stage}F0 {stage}B0" for stage in range(20)]
    edges = [(stage, (stage + 1) % 20) for stage in range(20)]
    with pytest.raises(ScheduleError, match="and 8 more"):
        simulate(written(*lines), edges=edges)
