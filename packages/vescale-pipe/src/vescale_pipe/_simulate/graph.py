"""A schedule as integer tensors for simulation: who waits for whom, and for how long a message is on its way.

The unit of simulation is an action, or a joined pair of them, which starts and ends as one. Units are numbered rank
after rank, in the order of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._schedule import Action, Kind, Schedule
from ..errors import ScheduleError
from .costs import Costs

__all__ = ["Graph", "encode"]


@dataclass(frozen=True, slots=True)
class Graph:
    """Units of a schedule and the messages between them; indexes are int64, seconds float64, all on the CPU."""

    first_action: Tensor
    """(P + 1): number of each rank's first action, if those of all ranks are counted in one row; last: of all."""
    first_unit: Tensor
    """(P + 1): the same for units."""
    unit: Tensor
    """(N): unit of each action."""
    members: Tensor
    """(U, 2): actions of each unit; -1 where there is no second one."""
    rank: Tensor
    """(U): rank of each unit."""
    kind: Tensor
    """(N)"""
    stage: Tensor
    """(N)"""
    microbatch: Tensor
    """(N)"""
    at: Tensor
    """(3, S, M): number of the action that is F, B or I, W of a stage and micro-batch; -1: there is none."""
    duration: Tensor
    """(U): seconds of each unit."""
    source: Tensor
    """(U, K): units that give what a unit takes; U: none."""
    giver: Tensor
    """(U, K): the action of that unit that gives it; -1: none."""
    taker: Tensor
    """(U, K): the stage that takes it."""
    delay: Tensor
    """(U, K): seconds from when its link is free, or there is no link, to its arrival."""
    transfer: Tensor
    """(U, K): seconds for which it occupies its link."""
    fifo: bool
    """Whether links carry one message at a time."""

    def action(self, number: int) -> Action:
        """Return an action by its number."""
        return Action(Kind(int(self.kind[number])), int(self.stage[number]), int(self.microbatch[number]))

    def outgoing(self) -> tuple[Tensor, Tensor]:
        """Return what each unit gives, in the order in which its rank sends it.

        Returns:
            slots: (U, J), places in the flattened (U, K) tables; U * K: none.
            link: (U * K + 1), the link of each place, counted from 0; the last is for "none".
        """
        units, width = self.source.shape
        slots = (self.source.flatten() < units).nonzero().flatten()
        giver = self.giver.flatten()[slots]
        # Program order of the sender; of what one action gives, the one for the lowest stage is sent first.
        order = torch.argsort(giver * self.at.shape[1] + self.taker.flatten()[slots])
        slots, sender = slots[order], self.unit[giver[order]]
        counts = torch.bincount(sender, minlength=units)
        nth = torch.arange(len(slots)) - (counts.cumsum(0) - counts)[sender]
        table = torch.full((units, max(1, int(counts.max()) if units else 1)), units * width)
        table[sender, nth] = slots
        ranks = len(self.first_unit) - 1
        link = torch.zeros(units * width + 1, dtype=torch.int64)
        if len(slots):
            pair = self.rank[sender] * ranks + self.rank[slots // width]
            link[slots] = torch.unique(pair, return_inverse=True)[1]
        return table, link


def encode(
    schedule: Schedule,
    costs: Costs,
    edges: Iterable[tuple[int, int]] | None = None,
    durations: Sequence[Tensor] | None = None,
) -> Graph:
    """Turn a schedule into tensors.

    Args:
        schedule: what to encode.
        costs: what its actions cost.
        edges: (producer stage, consumer stage); None: each stage gives to the next.
        durations: per rank the seconds of each action in place of those in `costs`; float, one per action.

    Raises:
        ScheduleError: an action names a stage or micro-batch that is not there, is there twice, is on a wrong rank,
            comes before one that must precede it on its rank, or takes what no action gives.
        ValueError: numbers of `costs`, `edges` or `durations` do not fit the schedule.
    """
    rows, stages, ranks = _rows(schedule), schedule.num_stages, schedule.num_ranks
    at = _table(rows)

    # Units: the second of a joined pair opens none.
    first_action = _bounds(torch.bincount(rows.owner, minlength=ranks))
    follows = torch.zeros_like(rows.joined)
    follows[1:] = rows.joined[:-1]
    unit = (~follows).cumsum(0) - 1
    heads = (~follows).nonzero().flatten()
    members = torch.stack([heads, torch.where(rows.joined[heads], heads + 1, -1)], dim=1)
    rank = rows.owner[heads]
    _check_order(rows, at, unit)

    giver = _givers(rows, at, _edges(edges, stages))
    paired = bool(rows.joined.any())
    takes = giver[members[:, 0]]
    if paired:
        other = torch.where((members[:, 1] >= 0).unsqueeze(1), giver[members[:, 1]], -1)
        takes = torch.cat([takes, other], dim=1)
    present = takes >= 0
    source = torch.where(present, unit[takes], len(heads))
    away = present & (rows.owner[takes] != rank.unsqueeze(1))
    # What goes forward has the size of the giver's output; a gradient that of what it is the gradient of.
    taker = rows.stage[members[:, : 2 if paired else 1]].repeat_interleave(giver.shape[1], dim=1)
    made_by = torch.where(rows.kind[takes] == Kind.F, rows.stage[takes], taker)
    transfer = costs.transfer(stages)[made_by] * away
    delay = torch.where(away, transfer + costs.latency, 0.0)
    return Graph(
        first_action=first_action,
        first_unit=_bounds(torch.bincount(rank, minlength=ranks)),
        unit=unit,
        members=members,
        rank=rank,
        kind=rows.kind,
        stage=rows.stage,
        microbatch=rows.microbatch,
        at=at,
        duration=_durations(rows, costs, durations, members),
        source=source,
        giver=takes,
        taker=taker,
        delay=delay,
        transfer=transfer,
        fifo=costs.link == "fifo",
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The actions of all ranks in one row."""

    schedule: Schedule
    owner: Tensor
    kind: Tensor
    stage: Tensor
    microbatch: Tensor
    joined: Tensor

    def refuse(self, which: Tensor, rule: str) -> ScheduleError:
        """Return the error for actions of a mask, of which the first is named."""
        number = int(which.nonzero()[0])
        rank = int(self.owner[number])
        index = number - sum(map(len, self.schedule.columns[:rank]))
        kind = int(self.kind[number])
        letter = Kind(kind).name if kind <= Kind.W else "?"
        text = f"{int(self.stage[number])}{letter}{int(self.microbatch[number])}"
        count = int(which.sum())
        more = f" ({count - 1} more like it)" if count > 1 else ""
        return ScheduleError(
            f"schedule {self.schedule.name!r} cannot be simulated: rank {rank}, action {index} ({text}): {rule}{more}. "
            "validate(schedule) tells all problems."
        )


def _rows(schedule: Schedule) -> _Rows:
    lengths = torch.tensor([len(some) for some in schedule.columns], dtype=torch.int64)
    rows = _Rows(
        schedule,
        torch.arange(schedule.num_ranks).repeat_interleave(lengths),
        torch.cat([some.kind for some in schedule.columns]).long(),
        torch.cat([some.stage for some in schedule.columns]).long(),
        torch.cat([some.microbatch for some in schedule.columns]).long(),
        torch.cat([some.joined for some in schedule.columns]),
    )
    alone = rows.joined.clone()
    alone[:-1] &= rows.joined[1:] | (rows.owner[1:] != rows.owner[:-1])
    if bool(alone.any()):
        raise rows.refuse(alone, "it is joined, so that one more of its rank must follow, which is not joined itself")
    return rows


def _bounds(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _edges(edges: Iterable[tuple[int, int]] | None, stages: int) -> list[tuple[int, int]]:
    if edges is None:
        return [(stage, stage + 1) for stage in range(stages - 1)]
    found = sorted({(int(giver), int(taker)) for giver, taker in edges})
    for giver, taker in found:
        if not (0 <= giver < stages and 0 <= taker < stages and giver != taker):
            raise ValueError(f"edges: {(giver, taker)} given; an edge is between two of the stages 0 to {stages - 1}.")
    return found


def _table(rows: _Rows) -> Tensor:
    """Return the table `Graph.at`, after a look at each action alone."""
    stages, microbatches = rows.schedule.num_stages, rows.schedule.num_microbatches
    placement = torch.tensor(rows.schedule.placement, dtype=torch.int64)
    strange = (rows.stage >= stages) | (rows.microbatch >= microbatches) | (rows.kind > Kind.W)
    if bool(strange.any()):
        raise rows.refuse(strange, f"there are stages 0 to {stages - 1}, micro-batches 0 to {microbatches - 1}")
    wrong = placement[rows.stage] != rows.owner
    if bool(wrong.any()):
        raise rows.refuse(wrong, "the schedule's placement gives its stage to another rank")
    key = (torch.tensor([0, 1, 1, 2])[rows.kind] * stages + rows.stage) * microbatches + rows.microbatch
    table = torch.full((3 * stages * microbatches,), -1)
    numbers = torch.arange(len(key))
    table[key] = numbers
    twice = table[key] != numbers
    if bool(twice.any()):
        raise rows.refuse(twice, "there is another one of its kind for this stage and micro-batch")
    return table.view(3, stages, microbatches)


def _check_order(rows: _Rows, at: Tensor, unit: Tensor) -> None:
    """Raise unless F, B or I, and W of a stage and micro-batch follow one another on their rank."""
    forward = at[0, rows.stage, rows.microbatch]
    late = (rows.kind != Kind.F) & ((forward < 0) | (unit[forward] >= unit))
    if bool(late.any()):
        raise rows.refuse(late, "the forward of its stage and micro-batch does not come before it")
    weights = (rows.kind == Kind.W).nonzero().flatten()
    back = at[1, rows.stage[weights], rows.microbatch[weights]]
    early = torch.zeros_like(late)
    early[weights] = (back >= 0) & ((rows.kind[back] == Kind.B) | (unit[back] >= unit[weights]))
    if bool(early.any()):
        raise rows.refuse(early, "of its stage and micro-batch there is an I that does not come before it, or a B")


def _givers(rows: _Rows, at: Tensor, edges: list[tuple[int, int]]) -> Tensor:
    """Return (N, K): the actions of other stages that each action takes something from; -1: none."""
    stages = rows.schedule.num_stages
    givers: list[list[int]] = [[] for _ in range(stages)]
    takers: list[list[int]] = [[] for _ in range(stages)]
    for giver, taker in edges:
        givers[taker].append(giver)
        takers[giver].append(taker)
    width = max([1, *map(len, givers), *map(len, takers)])
    padded = [[some + [-1] * (width - len(some)) for some in lists] for lists in (givers, takers)]
    near = torch.tensor(padded, dtype=torch.int64).view(2, stages, width)
    # A W without an I is the whole backward of a stage whose inputs need no gradients.
    weights = (rows.kind == Kind.W).nonzero().flatten()
    halves = weights[at[1, rows.stage[weights], rows.microbatch[weights]] >= 0]
    backward = (rows.kind != Kind.F).long()
    takes = near[backward, rows.stage]
    takes[halves] = -1
    found = at[backward.unsqueeze(1), takes, rows.microbatch.unsqueeze(1)]
    missing = (takes >= 0) & (found < 0) & (backward == 0).unsqueeze(1)
    if bool(missing.any()):
        some = missing.any(1)
        place = int(some.nonzero()[0])
        stage, microbatch = int(takes[place][missing[place]][0]), int(rows.microbatch[place])
        raise rows.refuse(some, f"it takes what {stage}F{microbatch} gives, which no rank does")
    # A backward of a later stage that is not there gives no gradient, so nobody waits for it.
    return torch.where(takes >= 0, found, -1)


def _durations(rows: _Rows, costs: Costs, durations: Sequence[Tensor] | None, members: Tensor) -> Tensor:
    """Return the seconds of each unit."""
    if durations is None:
        seconds = costs.seconds(rows.schedule.num_stages)[rows.kind, rows.stage]
    else:
        given = [torch.as_tensor(some, dtype=torch.float64).flatten() for some in durations]
        if [some.numel() for some in given] != [len(some) for some in rows.schedule.columns]:
            raise ValueError("durations: give one number for each action of each rank, in the order of the schedule.")
        seconds = torch.cat(given)
        if not bool((seconds.isfinite() & (seconds >= 0)).all()):
            raise ValueError("durations: they must be finite and not negative.")
    seconds = seconds / costs.speeds(rows.schedule.num_ranks)[rows.owner]
    one = seconds[members[:, 0]]
    pairs = (members[:, 1] >= 0).nonzero().flatten()
    if pairs.numel():
        other, mine = seconds[members[pairs, 1]], one[pairs]
        one[pairs] = torch.maximum(mine, other) + (1 - costs.overlap) * torch.minimum(mine, other)
    return one
