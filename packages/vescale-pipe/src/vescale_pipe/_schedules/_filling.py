"""Filling schedules on a V placement with weight gradients: all ranks at once, one unit of time after another.

Each action takes 1 and messages take nothing, so what a rank can do depends on counts alone. Down the ranks and back,
forwards and then input gradients form one path of 4P places; a place may go on when the place before it is ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._schedule import Columns, Kind

__all__ = ["fill"]

NOTHING, GIVEN, WEIGHT = 0, 1, 2
"""What a rank does in a unit of time: it waits, the next action of its order, or a weight gradient."""
KINDS = (Kind.F, Kind.F, Kind.I, Kind.I)
"""Of the four actions of a micro-batch on a rank: forwards of its first and second stage, then the way back."""


def fill(starts: Tensor, cap: int) -> tuple[Columns, ...] | None:
    """Return what ranks do if each follows its order as early as it can, and does a weight gradient where it cannot.

    Weight gradients follow the order of their input gradients. A forward waits while `cap` activations are kept, each
    from the start of its forward to that of its weight gradient.

    Args:
        starts: (ranks, 4 * micro-batches), when each action would start in a steady phase: per micro-batch the
            forwards of a rank's first and second stage, and the input gradients of its second and first. Only their
            order counts.
        cap: activations that a rank may keep.

    Returns:
        Per rank its actions; None if ranks wait for ever.
    """
    ranks, count = starts.shape[0], starts.shape[1] // 4
    order = starts.argsort(dim=1, stable=True)
    leg = (order % 4).to(torch.int64)
    rank = torch.arange(ranks)
    places = torch.stack((rank, 2 * ranks - 1 - rank, 2 * ranks + rank, 4 * ranks - 1 - rank), 1)
    # One more column, past the end: a place that never goes on.
    todo = torch.cat((places.gather(1, leg), torch.full((ranks, 1), 4 * ranks)), 1)
    found = _run(todo, count, cap)
    if found is None:
        return None
    found = found.t().contiguous()
    columns = []
    stages = torch.stack((rank, 2 * ranks - 1 - rank, 2 * ranks - 1 - rank, rank), 1).to(torch.int32)
    kinds = torch.tensor([int(kind) for kind in KINDS], dtype=torch.uint8)
    for number in range(ranks):
        some = found[number]
        some = some[some != NOTHING]
        is_weight = some == WEIGHT
        own = leg[number]
        # The n-th weight gradient is for the n-th input gradient.
        returns = (own >= 2).nonzero().flatten()
        at = torch.empty_like(some, dtype=torch.int64)
        at[~is_weight] = torch.arange(4 * count)
        at[is_weight] = returns
        kind = kinds[own[at]]
        kind[is_weight] = int(Kind.W)
        microbatch = (order[number, at] // 4).to(torch.int32)
        columns.append(Columns(kind, stages[number, own[at]], microbatch, torch.zeros(len(some), dtype=torch.bool)))
    return tuple(columns)


def _run(todo: Tensor, count: int, cap: int) -> Tensor | None:
    """Return per unit of time (row) and rank what it does; None if ranks wait for ever.

    Args:
        todo: (ranks, actions + 1), the place on the path of each action of a rank in order.
        count: micro-batches.
        cap: activations that a rank may keep.
    """
    ranks, length = todo.shape
    flat, first = todo.flatten(), torch.arange(ranks) * length
    # done[q + 1] is how many micro-batches place q has had; before place 0 there are all, past the end none.
    done = torch.zeros(4 * ranks + 2, dtype=torch.int64)
    done[0] = count
    done[-1] = count + 1
    last = first + length - 1
    at = first.clone()
    live, waiting = torch.zeros(ranks, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)
    rows: list[Tensor] = []
    while True:
        place = flat[at]
        forward = place < 2 * ranks
        go = (done[place] > done[place + 1]) & ((live < cap) | ~forward)
        weight = ~go & (waiting > 0)
        row = go + 2 * weight
        if not bool(row.any()):
            ended = bool((at == last).all()) and not bool(waiting.any())
            return torch.stack(rows).to(torch.uint8) if ended else None
        rows.append(row.to(torch.uint8))
        done.index_add_(0, place + 1, go.to(torch.int64))
        at += go
        begun = go & forward
        live += begun.to(torch.int64) - weight.to(torch.int64)
        waiting += go.to(torch.int64) - begun.to(torch.int64) - weight.to(torch.int64)
