"""What each rank keeps for its backwards while it goes through a schedule.

A forward takes the activation of its stage when it starts; a B gives it back when it ends, an I all but what its W
needs, a W that. Nothing is kept of a forward that no backward follows. Messages under way are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._schedule import Action, Kind
from .costs import Costs
from .graph import Graph

__all__ = ["Peak", "levels", "peaks"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank keeps at a time."""

    amount: float
    """Bytes, or activations where those cost 1."""
    index: int
    """Index of the action of the rank at which it is reached first; -1 if it keeps nothing ever."""
    action: Action | None
    """That action; None if there is none."""


def changes(graph: Graph, costs: Costs) -> tuple[Tensor, Tensor]:
    """Return what each action takes when it starts and when it ends (less than 0: gives back); float64, (N,) each."""
    kept, later = costs.memory(graph.at.shape[1])
    back = graph.at[1, graph.stage, graph.microbatch]
    weights = graph.at[2, graph.stage, graph.microbatch]
    kept, later = kept[graph.stage], later[graph.stage]
    is_f, is_w = graph.kind == Kind.F, graph.kind == Kind.W
    # An I without a W keeps nothing on; a W without an I is a whole backward.
    is_i = (graph.kind == Kind.I) & (weights >= 0)
    starts = torch.where(is_f, kept, 0.0)
    ends = torch.where(is_i, later - kept, -kept)
    ends = torch.where(is_w & (back >= 0), -later, ends)
    return starts, torch.where(is_f & ((back >= 0) | (weights >= 0)), 0.0, ends)


def levels(graph: Graph, costs: Costs, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a rank keeps after each start and end of an action.

    Returns:
        amount: float64, (2 n,) for n actions of the rank, in the order in which things happen.
        index: int64, (2 n,), the action of the rank that starts or ends.
        ends: bool, (2 n,), whether it ends.
    """
    return _levels(graph, *changes(graph, costs), rank)


def _levels(graph: Graph, starts: Tensor, ends: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    first, stop = graph.first_action[rank : rank + 2].tolist()
    events = torch.stack([starts[first:stop], ends[first:stop]], dim=1).flatten()
    index = torch.arange(stop - first).repeat_interleave(2)
    # Both of a joined pair start before either ends.
    opens = graph.unit[first:stop]
    pair = (opens[1:] == opens[:-1]).nonzero().flatten()
    order = torch.arange(len(events))
    order[2 * pair + 1], order[2 * pair + 2] = 2 * pair + 2, 2 * pair + 1
    return events[order].cumsum(0), index[order], order % 2 == 1


def peaks(graph: Graph, costs: Costs) -> tuple[Peak, ...]:
    """Return the most that each rank keeps, and where."""
    starts, ends = changes(graph, costs)
    found = []
    for rank in range(len(graph.first_action) - 1):
        amount, index, _ = _levels(graph, starts, ends, rank)
        place = int(amount.argmax()) if amount.numel() else 0
        if not amount.numel() or float(amount[place]) <= 0:
            found.append(Peak(0.0, -1, None))
            continue
        at = int(index[place])
        found.append(Peak(float(amount[place]), at, graph.action(int(graph.first_action[rank]) + at)))
    return tuple(found)
