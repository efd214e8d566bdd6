"""What must come before what, and a walk that runs all ranks as far as they get.

Only waits between ranks take part in the walk: between two of them a rank runs through, so that the start of an
action is the work before it on its rank plus the delay that the waits so far have added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._table import Table
from .action import Kind

__all__ = ["Waits", "Walk", "edge_waits", "join", "own_waits", "walk"]

# Work of a kind in the walk: a whole backward is an I and a W.
UNITS = (1, 2, 1, 1)
ROWS_AT_ONCE = 1 << 22
# A wave over ranks costs about as much as this many ranks one by one; so many thin waves are borne.
FEW_RANKS = 32
WAVES = 1 << 12


@dataclass(frozen=True, slots=True)
class Waits:
    """Pairs of rows: one action needs another one; int64, of one length."""

    consumer: Tensor
    """Row of the action that waits."""
    producer: Tensor
    """Row of the action that it waits for."""


def _backward_places(where: Tensor) -> Tensor:
    """Return the row of the action that makes gradients of inputs, B or I, or -1, per stage and micro-batch."""
    whole = where[Kind.B]
    return torch.where(whole >= 0, whole, where[Kind.I])


def _present(consumer: Tensor, producer: Tensor) -> Waits:
    both = (consumer >= 0) & (producer >= 0)
    return Waits(consumer[both], producer[both])


def join(waits: Iterable[Waits]) -> Waits:
    """Return all of them as one."""
    some = list(waits)
    empty = torch.empty(0, dtype=torch.int64)
    return Waits(
        torch.cat([empty, *(one.consumer for one in some)]), torch.cat([empty, *(one.producer for one in some)])
    )


def own_waits(where: Tensor) -> Waits:
    """Return waits inside a stage: B and I for F, W for I, or for F where there is no I.

    Args:
        where: as `first_places` gives it.
    """
    forward, inputs, weights = where[Kind.F], where[Kind.I], where[Kind.W]
    return join(
        (
            _present(where[Kind.B], forward),
            _present(inputs, forward),
            _present(weights, torch.where(inputs >= 0, inputs, forward)),
        )
    )


def _data_waits(places: Tensor, consumers: Tensor, producers: Tensor) -> Waits:
    """Return waits between stages, for all micro-batches.

    Args:
        places: rows of an action of each stage and micro-batch, or -1, int64 [stages, micro-batches].
        consumers: stages that wait, int64 [edges].
        producers: stages that they wait for, int64 [edges].
    """
    at_once = max(1, ROWS_AT_ONCE // max(1, places.shape[1]))
    return join(
        _present(places[waiting].flatten(), places[awaited].flatten())
        for waiting, awaited in zip(torch.split(consumers, at_once), torch.split(producers, at_once), strict=True)
    )


def edge_waits(where: Tensor, forward: tuple[tuple[int, int], ...], backward: tuple[tuple[int, int], ...]) -> Waits:
    """Return waits between stages: F for F of the producer, B and I for B or I of the consumer.

    Args:
        where: as `first_places` gives it.
        forward: edges on which values go.
        backward: edges on which gradients come back.
    """
    down = torch.tensor(forward, dtype=torch.int64).view(-1, 2)
    up = torch.tensor(backward, dtype=torch.int64).view(-1, 2)
    return join(
        (
            _data_waits(where[Kind.F], down[:, 1], down[:, 0]),
            _data_waits(_backward_places(where), up[:, 0], up[:, 1]),
        )
    )


@dataclass(frozen=True, slots=True)
class Walk:
    """How far ranks get, and when."""

    waits: Waits
    """Waits between ranks, by the row of the consumer."""
    blocked: dict[int, int]
    """Per rank that does not come to its end, the place in `waits` where it stops."""
    start: Tensor | None
    """Time at which each row starts, int64; None where a rank is blocked or times were not asked for."""
    end: Tensor | None
    """Time at which each row, and what it is paired with, is over; as `start`."""


def walk(table: Table, waits: Waits, num_ranks: int, *, timed: bool = False) -> Walk:
    """Run every rank until it ends or waits for ever.

    Args:
        table: the actions.
        waits: what needs what; pairs on one rank are taken as obeyed.
        num_ranks: ranks that there are.
        timed: whether times are wanted, for F = I = W = 1, B = 2 and messages that take no time.
    """
    across = table.rank[waits.consumer] != table.rank[waits.producer]
    consumer, producer = waits.consumer[across], waits.producer[across]
    order = torch.argsort(table.unit[consumer], stable=True)
    consumer, producer = consumer[order], producer[order]
    waiting, awaited = table.unit[consumer], table.unit[producer]

    ranks = torch.arange(num_ranks + 1)
    first_row = torch.searchsorted(table.rank, ranks)
    first_wait = torch.searchsorted(waiting, first_row)
    count = consumer.numel()
    # A producer is over when its rank has got through all of its own waits up to it.
    link = torch.searchsorted(waiting, awaited, right=True) - 1
    link[link < first_wait[table.rank[producer]]] = count
    if timed:
        before, after = _work(table, first_row)
        need = after[producer] - before[consumer]
    else:
        need = torch.zeros(count, dtype=torch.int64)
    delays = torch.full((count + 1,), -1)
    delays[count] = 0  # where `link` points for what waits for nothing
    heads = first_wait[:-1].clone()
    _run_waves(link, need, first_wait, delays, heads)
    if bool((heads < first_wait[1:]).any()):
        delays, heads = _run(link, need, first_wait, delays, heads)
    stopped = (heads < first_wait[1:]).nonzero().flatten()
    blocked = dict(zip(stopped.tolist(), heads[stopped].tolist(), strict=True))
    start = end = None
    if timed and not blocked:
        last = torch.searchsorted(waiting, table.unit, right=True) - 1
        last[last < first_wait[table.rank]] = count
        delay = delays[last]
        start, end = before + delay, after + delay
    return Walk(Waits(consumer, producer), blocked, start, end)


def _work(table: Table, first_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the work of a row's rank before the row's unit starts, and when it ends."""
    cost = torch.tensor(UNITS)[table.kind]
    total = cost.cumsum(0)
    offset = (total - cost)[first_row[table.rank]]
    last = torch.searchsorted(table.unit, table.unit, right=True) - 1
    return (total - cost)[table.unit] - offset, total[last] - offset


def _run_waves(link: Tensor, need: Tensor, first: Tensor, delays: Tensor, heads: Tensor) -> None:
    """Advance all ranks together, a wait of each at a time, as long as that is faster than one rank at a time.

    Args:
        link: per wait the one that must be over before, int64.
        need: per wait what is added to the delay of that one, int64.
        first: per rank its first wait, and the number of all, int64.
        delays: the delay after each wait, -1 where none has come there, and one that is 0; filled in here.
        heads: per rank the wait that it has come to; advanced here.
    """
    stop = first[1:]
    padded = torch.cat([link, link.new_zeros(1)])
    current = torch.zeros_like(heads)
    left = WAVES
    while heads.numel() >= FEW_RANKS:
        other = delays[padded[heads]]
        ready = ((other >= 0) & (heads < stop)).nonzero().flatten()
        left += ready.numel() // FEW_RANKS - 1
        if ready.numel() == 0 or left < 0:
            return
        places = heads[ready]
        later = torch.maximum(current[ready], other[ready] + need[places])
        delays[places] = later
        current[ready] = later
        heads[ready] += 1


def _run(link: Tensor, need: Tensor, first: Tensor, delays: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """Advance one rank at a time until each ends or waits for ever; return delays and heads as in `_run_waves`."""
    links, needs, firsts = link.tolist(), need.tolist(), first.tolist()
    after, places = delays.tolist(), heads.tolist()
    sleepers: dict[int, list[int]] = {}
    todo = deque(range(len(places)))
    while todo:
        rank = todo.popleft()
        at, stop = places[rank], firsts[rank + 1]
        delay = after[at - 1] if at > firsts[rank] else 0
        while at < stop:
            other = after[links[at]]
            if other < 0:
                sleepers.setdefault(links[at], []).append(rank)
                break
            other += needs[at]
            if other > delay:
                delay = other
            after[at] = delay
            if at in sleepers:
                todo.extend(sleepers.pop(at))
            at += 1
        places[rank] = at
    return torch.tensor(after), torch.tensor(places)
