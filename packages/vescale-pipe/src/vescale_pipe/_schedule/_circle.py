"""Ranks that wait for each other: who stops where, and the circle of waits in words."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["blocked_text", "circles"]

MOST_RANKS = 16


def circles(waits_for: dict[int, int]) -> list[list[int]]:
    """Return the circles of a graph in which each node points at one.

    Args:
        waits_for: per blocked rank the rank that it waits for, which is blocked too.

    Returns:
        The ranks of each circle in the order of the waits, the lowest first.

    Example:
        >>> circles({0: 1, 1: 2, 2: 1, 5: 5})
        [[1, 2], [5]]
    """
    found = []
    seen: dict[int, int] = {}
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen[rank] = start
            path.append(rank)
            rank = waits_for[rank]
        if seen[rank] == start and rank in path:
            circle = path[path.index(rank) :]
            lowest = circle.index(min(circle))
            found.append(circle[lowest:] + circle[:lowest])
    return found


def blocked_text(circle: list[int], tell: Callable[[int], str], blocked: dict[int, str]) -> str:
    """Return words for a circle.

    Args:
        circle: its ranks.
        tell: from a rank to what it stops at and what it waits for.
        blocked: per rank that is blocked, in the circle or not, what it stops at.
    """
    chain = "; ".join(tell(rank) for rank in circle[:MOST_RANKS])
    if len(circle) > MOST_RANKS:
        chain += f"; ... {len(circle) - MOST_RANKS} more ranks in the circle"
    every = ", ".join(f"rank {rank} at {what}" for rank, what in sorted(blocked.items())[:MOST_RANKS])
    if len(blocked) > MOST_RANKS:
        every += f", ... {len(blocked) - MOST_RANKS} more"
    return f"ranks wait for each other: {chain}. Blocked: {every}. Move one of these actions."
