"""From computation to computation and messages: which rank sends what to whom, and when.

Every message is one point of one global order, at the time when its producer is done, and each rank follows that
order. So even if each SEND waits for its RECV, the earliest message that is left has both ends at the head of their
lists, and goes through: nothing can block for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

from ._edges import stage_edges
from ._given import need_schedule
from ._program import Op, Program, Step
from ._table import Table, first_places, make_table
from ._waits import Waits, edge_waits, join, own_waits, walk
from .action import Kind
from .check import validate
from .schedule import Columns, Schedule

__all__ = ["Op", "Program", "Step", "lower"]

Edges = Iterable[tuple[int, int]]


class _Steps(Sequence[tuple[Step, ...]]):
    """Steps per rank, made from columns when a rank is asked for: a rank runs its own only."""

    def __init__(self, columns: tuple[tuple[Tensor, ...], ...]) -> None:
        self._columns = columns
        self._made: dict[int, tuple[Step, ...]] = {}

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, index: int) -> tuple[Step, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Step, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[Step, ...] | Sequence[tuple[Step, ...]]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        rank = range(len(self))[index]
        found = self._made.get(rank)
        if found is None:
            ops = tuple(Op)
            op, *rest = (column.tolist() for column in self._columns[rank])
            found = tuple(map(Step, map(ops.__getitem__, op), *rest))
            self._made[rank] = found
        return found


def lower(
    schedule: Schedule, edges: Edges | None = None, *, grad_edges: Edges | None = None, backward: bool = True
) -> Program:
    """Put the messages into a schedule.

    A message lies where its value is made in time, if F, I and W take 1 and B takes 2: its SEND comes right after
    what makes the value, its RECV after what the receiver has begun by then. Between stages of one rank there is none.

    Args:
        schedule: what is computed; it must be valid.
        edges: (producer, consumer) pairs of stages; by default each stage takes values of the one before it.
        grad_edges: those of them that a gradient comes back on; all of them by default.
        backward: whether to keep more than the forwards.

    Raises:
        ScheduleError: the schedule breaks a rule.

    Example:
        >>> from vescale_pipe import Action, Kind, Schedule, lower
        >>> f, b = (lambda stage: Action(Kind.F, stage, 0)), (lambda stage: Action(Kind.B, stage, 0))
        >>> program = lower(Schedule.of("two", [0, 1], 1, [[f(0), b(0)], [f(1), b(1)]]))
        >>> for steps in program.steps:
        ...     print(*steps)
        0F0 0SEND_F0>1 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1B0 1SEND_B0>0
    """
    need_schedule(schedule, "lower")
    down = stage_edges(edges, schedule.num_stages)
    up = down if grad_edges is None else stage_edges(grad_edges, schedule.num_stages)
    validate(schedule, edges=down, grad_edges=up)
    if not backward:
        schedule, up = _forwards(schedule), ()
    table = make_table(schedule)
    where, _ = first_places(table, schedule.num_stages, schedule.num_microbatches)
    waits = join((own_waits(where), edge_waits(where, down, up)))
    done = walk(table, waits, schedule.num_ranks, timed=True)
    assert done.start is not None  # a valid schedule comes to its end
    assert done.end is not None
    return Program(schedule, down, up, _Steps(_merge(table, done.waits, done.start, done.end, schedule.num_ranks)))


def _forwards(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule, as a schedule."""
    columns = []
    for one in schedule.columns:
        keep = one.kind == Kind.F
        # A pair of forwards stays one; of a forward and a backward, one is gone.
        joined = one.joined & torch.cat([keep[1:], keep.new_zeros(1)])[: len(one)]
        columns.append(Columns(one.kind[keep], one.stage[keep], one.microbatch[keep], joined[keep]))
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(columns))


def _merge(table: Table, messages: Waits, start: Tensor, end: Tensor, num_ranks: int) -> tuple[tuple[Tensor, ...], ...]:
    """Return per rank the columns of its steps: operation, stage, micro-batch, peer, other.

    Args:
        table: the actions.
        messages: consumer and producer of each message.
        start: when each action starts.
        end: when each action, and what it is paired with, is over.
        num_ranks: ranks that there are.
    """
    # One order for all ranks: by time, and where messages and actions are at one time, messages first.
    order = torch.argsort(messages.consumer, stable=True)
    order = order[torch.argsort(messages.producer[order], stable=True)]
    consumer, producer = messages.consumer[order], messages.producer[order]
    sent = end[producer]
    number = torch.arange(producer.numel())
    none = torch.full_like(table.rank, -1)
    send = torch.where(table.kind[producer] == Kind.F, int(Op.SEND_F), int(Op.SEND_B))
    columns = (
        torch.cat([table.kind, send, send + 1]),
        torch.cat([table.stage, table.stage[producer], table.stage[consumer]]),
        torch.cat([table.microbatch, table.microbatch[producer], table.microbatch[consumer]]),
        torch.cat([none, table.rank[consumer], table.rank[producer]]),
        torch.cat([none, table.stage[consumer], table.stage[producer]]),
    )
    rank = torch.cat([table.rank, table.rank[producer], table.rank[consumer]])
    when = torch.cat([2 * start + 1, 2 * sent, 2 * sent])
    place = torch.argsort(torch.cat([torch.arange(len(table)), number, number]), stable=True)
    place = place[torch.argsort(when[place], stable=True)]
    place = place[torch.argsort(rank[place], stable=True)]
    lengths = torch.bincount(rank, minlength=num_ranks).tolist()
    parts = [torch.split(column[place], lengths) for column in columns]
    return tuple(zip(*parts, strict=True))
