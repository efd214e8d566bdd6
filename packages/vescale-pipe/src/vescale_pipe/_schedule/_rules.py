"""The rules about single actions: on which rank, how often, in which order on a rank, how much is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ._problem import Found, Problem, Rule
from ._table import Table
from ._waits import Waits
from .action import Action, Kind
from .schedule import Schedule

__all__ = ["check_canonical", "check_complete", "check_memory", "check_order", "check_placement"]


def at(table: Table, row: int, rule: Rule, text: str) -> Problem:
    """Return a problem of the action of a row."""
    return Problem(int(table.rank[row]), int(table.index[row]), table.action(row), rule, text)


def name(table: Table, row: int) -> str:
    """Return the action of a row and its place in its list."""
    return f"{table.action(row)} (index {int(table.index[row])})"


def check_placement(schedule: Schedule, table: Table, found: Found) -> None:
    """Actions are on the ranks of their stages."""
    owner = torch.tensor(schedule.placement)

    def make(row: int) -> Problem:
        stage = int(table.stage[row])
        return at(table, row, Rule.PLACEMENT, f"stage {stage} is placed on rank {int(owner[stage])}; move it there.")

    found.add_all(Rule.PLACEMENT, (owner[table.stage] != table.rank).nonzero().flatten(), make)


def check_complete(schedule: Schedule, table: Table, where: Tensor, repeats: Tensor, found: Found) -> None:
    """Every micro-batch goes forward and backward through every stage, once."""

    def repeated(row: int) -> Problem:
        action = table.action(row)
        first = int(where[action.kind, action.stage, action.microbatch])
        text = f"it is there already, on rank {int(table.rank[first])} at index {int(table.index[first])}; drop one."
        return at(table, row, Rule.COMPLETE, text)

    found.add_all(Rule.COMPLETE, repeats.nonzero().flatten(), repeated)

    there = where >= 0
    forward, whole, inputs, weights = there[Kind.F], there[Kind.B], there[Kind.I], there[Kind.W]
    microbatches = schedule.num_microbatches

    def missing(kind: Kind, mask: Tensor, text: str) -> None:
        def make(cell: int) -> Problem:
            action = Action(kind, cell // microbatches, cell % microbatches)
            return Problem(schedule.placement[action.stage], -1, action, Rule.COMPLETE, text)

        found.add_all(Rule.COMPLETE, mask.flatten().nonzero().flatten(), make)

    missing(Kind.F, ~forward, "it is missing.")
    if not bool(there[1:].any()):
        return
    none = ~(whole | inputs | weights)
    missing(Kind.B, none, "it is missing, and there is no I and W in its place.")
    missing(Kind.I, weights & ~inputs & ~whole, "it is missing, though there is its W.")
    missing(Kind.W, inputs & ~weights & ~whole, "it is missing, though there is its I.")

    def mixed(cell: int) -> Problem:
        stage, microbatch = divmod(cell, microbatches)
        others = " and ".join(
            name(table, int(where[kind, stage, microbatch]))
            for kind in (Kind.I, Kind.W)
            if bool(there[kind, stage, microbatch])
        )
        row = int(where[Kind.B, stage, microbatch])
        return at(table, row, Rule.COMPLETE, f"there is {others} too; a backward is either one B or an I and a W.")

    found.add_all(Rule.COMPLETE, (whole & (inputs | weights)).flatten().nonzero().flatten(), mixed)


def check_order(table: Table, waits: Waits, rule: Rule, found: Found) -> None:
    """On one rank, what is needed comes first; the two of a pair start together, so neither may need the other."""
    same = table.rank[waits.consumer] == table.rank[waits.producer]
    wrong = (same & (table.unit[waits.producer] >= table.unit[waits.consumer])).nonzero().flatten()

    def make(place: int) -> Problem:
        consumer, producer = int(waits.consumer[place]), int(waits.producer[place])
        if int(table.unit[consumer]) == int(table.unit[producer]):
            text = f"it needs {name(table, producer)}, with which it is joined; only what is independent may overlap."
        else:
            text = f"it needs {name(table, producer)}, which comes after it on the same rank; swap them."
        return at(table, consumer, rule, text)

    found.add_all(rule, wrong, make)


def _late(rows: Tensor, none: int) -> Tensor:
    """Return the rows that are before one of an earlier micro-batch.

    Args:
        rows: rows of what adds gradients, or -1, int64 [stages, micro-batches].
        none: a row after all others.
    """
    if rows.shape[1] < 2:
        return rows.new_empty(0)
    so_far = rows.cummax(1).values[:, :-1]
    mine = torch.where(rows[:, 1:] >= 0, rows[:, 1:], none)
    return mine[mine < so_far]


def check_canonical(table: Table, where: Tensor, found: Found) -> None:
    """Gradients are added by rising micro-batch.

    A W adds gradients of what its I left out, a B those of both. So B and W of a stage must be in order, and B and I.
    """
    none = len(table)
    both = [torch.where(where[Kind.B] >= 0, where[Kind.B], where[kind]) for kind in (Kind.I, Kind.W)]
    wrong = torch.unique(torch.cat([_late(rows, none) for rows in both]))

    def make(row: int) -> Problem:
        text = (
            "it adds gradients before an earlier micro-batch does; sums then differ from one device in the last bits."
        )
        return at(table, row, Rule.CANONICAL, text)

    found.add_all(Rule.CANONICAL, wrong, make)


def check_memory(schedule: Schedule, table: Table, where: Tensor, memory: int, found: Found) -> None:
    """No rank keeps more than `memory` activations: those of a stage and micro-batch from F to B or W."""
    if not bool((where[1:] >= 0).any()):
        return
    none = len(table)
    forward = where[Kind.F].flatten()
    ends = torch.where(where[[Kind.B, Kind.W]] >= 0, where[[Kind.B, Kind.W]], none).amin(0).flatten()
    forward, ends = forward[forward >= 0], ends[forward >= 0]
    change = torch.zeros(none + 1, dtype=torch.int64)
    change[forward] = 1
    # An end before its beginning, or on another rank, is told by other rules and ends nothing.
    ended = (ends < none) & (ends > forward)
    here = table.rank[forward[ended]] == table.rank[ends[ended]]
    change[ends[ended][here]] = -1
    first_row = torch.searchsorted(table.rank, torch.arange(schedule.num_ranks + 1)).tolist()
    for rank in range(schedule.num_ranks):
        live = change[first_row[rank] : first_row[rank + 1]].cumsum(0)
        over = (live > memory).nonzero().flatten()
        if over.numel():
            text = (
                f"the rank then keeps {int(live[over[0]])} activations, of {memory} that it may, and {int(live.max())} "
                "at its peak; run backwards (B or W) earlier or forwards later."
            )
            found.add(at(table, first_row[rank] + int(over[0]), Rule.MEMORY, text))
