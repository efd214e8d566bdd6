"""Whether what was given as a schedule is one: names and texts of schedules are the usual mistakes."""

from __future__ import annotations

from typing import Any

from ..errors import ScheduleError
from .schedule import Schedule

__all__ = ["need_schedule"]


def need_schedule(what: Any, function: str) -> None:
    """Refuse what is no schedule.

    Args:
        what: that was given.
        function: it was given to.

    Raises:
        ScheduleError: it is no schedule; the message says how to get one.
    """
    if isinstance(what, Schedule):
        return
    if not isinstance(what, str):
        raise ScheduleError(
            f"{function}: a Schedule is needed, and a {type(what).__name__} was given; build_schedule, optimize, "
            "from_csv, from_json and Schedule.of make one."
        )
    if "\n" in what or "," in what:
        raise ScheduleError(f"{function}: a text was given; make a Schedule of it first, by from_csv or from_json.")
    raise ScheduleError(
        f"{function}: {what!r} is a name; build the schedule first: build_schedule({what!r}, num_ranks, "
        "num_microbatches)."
    )
