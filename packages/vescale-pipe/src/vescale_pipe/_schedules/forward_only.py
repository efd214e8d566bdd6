"""What is left of a schedule when nothing is trained."""

from __future__ import annotations

import torch

from .._schedule import Columns, Kind, Schedule
from .._schedule._given import need_schedule

__all__ = ["forward_only"]


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, in its order and on its placement; for evaluation and generation.

    Args:
        schedule: any valid one.

    Example:
        >>> from vescale_pipe import build_schedule
        >>> [str(action) for action in forward_only(build_schedule("1f1b", 2, 2)).actions(1)]
        ['1F0', '1F1']
    """
    need_schedule(schedule, "forward_only")
    columns = []
    for rows in schedule.columns:
        keep = rows.kind == Kind.F
        joined = torch.zeros(int(keep.sum()), dtype=torch.bool)
        columns.append(Columns(rows.kind[keep], rows.stage[keep], rows.microbatch[keep], joined))
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(columns))
