"""Tells why a simulation does not go on: which actions wait for each other."""

from __future__ import annotations

from ..errors import ScheduleError
from .graph import Graph

__all__ = ["stuck"]

SHOWN = 12


def stuck(graph: Graph, position: list[int]) -> ScheduleError:
    """Return the error of a schedule in which ranks wait for each other for ever.

    Args:
        graph: the schedule.
        position: per rank the unit that it would do next.
    """
    ends = graph.first_unit[1:].tolist()
    waits: dict[int, tuple[int, int]] = {}
    for rank, unit in enumerate(position):
        if unit == ends[rank]:
            continue
        for source, giver in zip(graph.source[unit].tolist(), graph.giver[unit].tolist(), strict=True):
            if source < len(graph.rank) and source >= position[int(graph.rank[source])]:
                waits[rank] = (unit, giver)
                break
    # Each waiting rank has one that it waits for, so that walking on comes back to where it has been.
    rank, seen = next(iter(waits)), []
    while rank not in seen:
        seen.append(rank)
        rank = int(graph.rank[graph.unit[waits[rank][1]]])
    chain = seen[seen.index(rank) :]
    lines = []
    for rank in chain[:SHOWN]:
        unit, giver = waits[rank]
        action, taken = graph.action(int(graph.members[unit, 0])), graph.action(giver)
        lines.append(f"rank {rank} waits at {action} for {taken} of rank {int(graph.rank[graph.unit[giver]])}")
    if len(chain) > SHOWN:
        lines.append(f"and {len(chain) - SHOWN} more")
    return ScheduleError(
        "the schedule does not go on: " + "; ".join(lines) + ". Change the order of one of these ranks."
    )
