"""Whether the columns of a schedule and its placement can be read at all."""

from __future__ import annotations

import torch
from torch import Tensor

from ._problem import Found, Problem, Rule
from ._table import Table
from .action import Kind
from .schedule import Columns, Schedule

__all__ = ["check_form", "check_rows"]

TYPES = {"kind": torch.uint8, "stage": torch.int32, "microbatch": torch.int32, "joined": torch.bool}


def check_form(schedule: Schedule, found: Found) -> bool:
    """Add what is wrong with types, lengths and the placement; return whether rows can be made of the columns."""
    readable = True
    for what, count in (
        ("ranks", schedule.num_ranks),
        ("stages", schedule.num_stages),
        ("micro-batches", schedule.num_microbatches),
    ):
        if count < 1:
            found.add(Problem(-1, -1, None, Rule.FORM, f"it has {count} {what}; at least 1 is needed."))
            readable = False
    for rank, columns in enumerate(schedule.columns):
        for name, dtype in TYPES.items():
            column: Tensor = getattr(columns, name)
            if column.dtype != dtype or column.shape != (len(columns),) or column.device.type != "cpu":
                text = (
                    f"column {name} is {column.dtype} of shape {tuple(column.shape)} on {column.device}; "
                    f"it must be {dtype} of shape ({len(columns)},) on the CPU, as column kind is long."
                )
                found.add(Problem(rank, -1, None, Rule.FORM, text))
                readable = False
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.num_ranks:
            text = f"stage {stage} is placed on rank {rank}; there are ranks 0 to {schedule.num_ranks - 1}."
            found.add(Problem(-1, -1, None, Rule.PLACEMENT, text))
    for rank in sorted(set(range(schedule.num_ranks)) - set(schedule.placement)):
        text = "no stage is placed on it; take fewer ranks or place a stage there."
        found.add(Problem(rank, -1, None, Rule.PLACEMENT, text))
    if readable:
        for rank, columns in enumerate(schedule.columns):
            _check_joined(rank, columns, found)
    return readable


def _check_joined(rank: int, columns: Columns, found: Found) -> None:
    joined = columns.joined
    if not bool(joined.any()):
        return

    def make(index: int) -> Problem:
        if index == len(columns) - 1:
            text = "the last action of a rank is joined with the one after it, which is not there."
        else:
            text = "it is joined both with the action before it and with the one after it; only pairs overlap."
        return Problem(rank, index, None, Rule.FORM, text)

    wrong = joined.clone()
    wrong[1:] &= joined[:-1]
    wrong[0] = False
    wrong[-1] = joined[-1]
    found.add_all(Rule.FORM, wrong.nonzero().flatten(), make)


def check_rows(schedule: Schedule, table: Table, found: Found) -> Tensor:
    """Add rows whose kind, stage or micro-batch does not exist; return which rows are good, bool."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    kind_ok = table.kind < len(Kind)
    stage_ok = (table.stage >= 0) & (table.stage < stages)
    microbatch_ok = (table.microbatch >= 0) & (table.microbatch < microbatches)

    def problem(row: int, rule: Rule, text: str) -> Problem:
        action = table.action(row) if bool(kind_ok[row]) else None
        return Problem(int(table.rank[row]), int(table.index[row]), action, rule, text)

    found.add_all(
        Rule.FORM,
        (~kind_ok).nonzero().flatten(),
        lambda row: problem(row, Rule.FORM, f"kind {int(table.kind[row])} is none of 0 to {len(Kind) - 1}: F B I W."),
    )
    found.add_all(
        Rule.PLACEMENT,
        (~stage_ok).nonzero().flatten(),
        lambda row: problem(row, Rule.PLACEMENT, f"no such stage: there are stages 0 to {stages - 1}."),
    )
    found.add_all(
        Rule.COMPLETE,
        (~microbatch_ok).nonzero().flatten(),
        lambda row: problem(row, Rule.COMPLETE, f"no such micro-batch: there are 0 to {microbatches - 1}."),
    )
    return kind_ok & stage_ok & microbatch_ok
