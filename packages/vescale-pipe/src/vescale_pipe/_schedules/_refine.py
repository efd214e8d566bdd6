"""Small changes to a schedule that may make it faster: merge, join, split, and swap neighbours."""

from __future__ import annotations

from collections.abc import Iterator

from .._schedule import Action, Kind, Schedule

__all__ = ["merged", "neighbours", "paired", "renamed"]


def renamed(name: str, how: str) -> str:
    """Return the name of a changed schedule.

    Example:
        >>> renamed(renamed("1f1b", "changed"), "changed")
        '1f1b, changed'
    """
    return name if name.endswith(f", {how}") else f"{name}, {how}"


def merged(schedule: Schedule) -> Schedule:
    """Return a schedule with a whole backward wherever an input gradient and its weight gradient follow each other."""
    rows = []
    for rank in range(schedule.num_ranks):
        row: list[Action] = []
        for action in schedule.actions(rank):
            if action.kind is Kind.W and row and row[-1] == action._replace(kind=Kind.I):
                row[-1] = action._replace(kind=Kind.B)
            else:
                row.append(action)
        rows.append(row)
    return Schedule.of(renamed(schedule.name, "merged"), schedule.placement, schedule.num_microbatches, rows)


def paired(schedule: Schedule, forward_first: bool) -> Schedule:
    """Return a schedule with neighbours joined where they are a forward and a backward of different micro-batches.

    Ranks may then wait for each other in a circle; simulation tells.

    Args:
        schedule: any, without joined pairs.
        forward_first: whether the forward is the first of the two or the second.
    """
    joined = []
    for rank in range(schedule.num_ranks):
        row, index = schedule.actions(rank), 0
        while index < len(row) - 1:
            first, second = row[index], row[index + 1]
            forward, backward = (first, second) if forward_first else (second, first)
            fit = forward.kind is Kind.F and backward.kind in (Kind.B, Kind.I)
            if fit and forward.microbatch != backward.microbatch:
                joined.append((rank, index))
                index += 1
            index += 1
    rows = [schedule.actions(rank) for rank in range(schedule.num_ranks)]
    name = renamed(schedule.name, "joined")
    return Schedule.of(name, schedule.placement, schedule.num_microbatches, rows, joined)


def neighbours(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the schedules that differ in one place: two neighbours swapped, halves merged, or a backward split.

    Swaps that no rank can run, or that change the order of gradients, are left out. A schedule with joined pairs has
    none.

    Args:
        schedule: any.
    """
    rows = [list(schedule.actions(rank)) for rank in range(schedule.num_ranks)]
    if any(schedule.joined(rank) for rank in range(schedule.num_ranks)):
        return
    name = renamed(schedule.name, "changed")
    for rank, row in enumerate(rows):
        for index, action in enumerate(row):
            for length, changed in _changes(action, row[index + 1] if index + 1 < len(row) else None):
                new = [*row[:index], *changed, *row[index + length :]]
                yield Schedule.of(
                    name, schedule.placement, schedule.num_microbatches, [*rows[:rank], new, *rows[rank + 1 :]]
                )


def _changes(first: Action, second: Action | None) -> Iterator[tuple[int, list[Action]]]:
    """Yield how many actions to replace from `first` on, and by what."""
    if first.kind is Kind.B:
        yield 1, [first._replace(kind=Kind.I), first._replace(kind=Kind.W)]
    if second is None:
        return
    if first.kind is Kind.I and second == first._replace(kind=Kind.W):
        yield 2, [first._replace(kind=Kind.B)]
    same_order = first.kind is second.kind or (first.kind is not Kind.F and second.kind is not Kind.F)
    if first.stage != second.stage or (
        first.microbatch != second.microbatch and not (same_order and _in_order(first, second))
    ):
        yield 2, [second, first]


def _in_order(first: Action, second: Action) -> bool:
    """Tell whether a stage must keep the order of two backwards: only I and W of different micro-batches may pass."""
    return {first.kind, second.kind} != {Kind.I, Kind.W}
