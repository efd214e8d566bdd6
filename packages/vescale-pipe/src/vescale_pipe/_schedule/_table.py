"""All actions of a schedule as flat columns, and where each of them is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Kind
from .schedule import Schedule

__all__ = ["Table", "first_places", "make_table"]


@dataclass(frozen=True, slots=True)
class Table:
    """The actions of all ranks one after the other; all columns are int64, of one length."""

    rank: Tensor
    """Rank in whose list the action is."""
    index: Tensor
    """Place in that list."""
    kind: Tensor
    """Value of `Kind`."""
    stage: Tensor
    """Number of the stage."""
    microbatch: Tensor
    """Number of the micro-batch."""
    unit: Tensor
    """Row of the first action that starts together with this one: its own row, or the one before it in a pair."""

    def __len__(self) -> int:
        return self.rank.numel()

    def action(self, row: int) -> Action:
        """Return the action of a row."""
        return Action(Kind(int(self.kind[row])), int(self.stage[row]), int(self.microbatch[row]))


def make_table(schedule: Schedule) -> Table:
    """Return the rows of a schedule; columns must have their right types and lengths."""
    columns = schedule.columns
    lengths = torch.tensor([len(one) for one in columns])
    starts = lengths.cumsum(0) - lengths
    rank = torch.repeat_interleave(torch.arange(len(columns)), lengths)
    row = torch.arange(rank.numel())
    after_joined = torch.zeros(row.numel(), dtype=torch.int64)
    joined = torch.cat([one.joined for one in columns])
    # The last of a rank joins nothing, whatever its mark says.
    first = torch.zeros_like(joined)
    first[starts[lengths > 0]] = True
    after_joined[1:] = (joined[:-1] & ~first[1:]).to(torch.int64)
    return Table(
        rank,
        row - starts[rank],
        torch.cat([one.kind for one in columns]).to(torch.int64),
        torch.cat([one.stage for one in columns]).to(torch.int64),
        torch.cat([one.microbatch for one in columns]).to(torch.int64),
        row - after_joined,
    )


def select(table: Table, keep: Tensor) -> Table:
    """Return the rows where `keep`, a bool tensor, is true."""
    unit = table.unit[keep]
    return Table(
        table.rank[keep],
        table.index[keep],
        table.kind[keep],
        table.stage[keep],
        table.microbatch[keep],
        torch.searchsorted(unit, unit),
    )


def first_places(table: Table, num_stages: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Return where actions are.

    Args:
        table: rows, all with stages and micro-batches that exist.
        num_stages: stages that there are.
        num_microbatches: micro-batches that there are.

    Returns:
        The first row of each action, or -1, int64 [kinds, stages, micro-batches]; and per row whether it repeats an
        action of an earlier row, bool.
    """
    key = (table.kind * num_stages + table.stage) * num_microbatches + table.microbatch
    row = torch.arange(len(table))
    size = len(Kind) * num_stages * num_microbatches
    none = len(table)
    where = torch.full((size,), none).scatter_reduce_(0, key, row, "amin")
    repeats = where[key] != row
    where[where == none] = -1
    return where.view(len(Kind), num_stages, num_microbatches), repeats
