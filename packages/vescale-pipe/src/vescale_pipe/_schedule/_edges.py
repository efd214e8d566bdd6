"""Which stage takes values of which: pairs of a producer and a consumer."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ScheduleError

__all__ = ["chain", "stage_edges"]

Edges = tuple[tuple[int, int], ...]


def chain(num_stages: int) -> Edges:
    """Return the edges of stages where each takes values of the one before it."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def stage_edges(edges: Iterable[tuple[int, int]] | None, num_stages: int) -> Edges:
    """Return edges sorted and each once; a chain for None.

    Args:
        edges: (producer, consumer) pairs of stages, or None.
        num_stages: stages that there are.

    Raises:
        ScheduleError: an edge is not from a stage to a later one.

    Example:
        >>> stage_edges([(1, 2), (0, 2), (1, 2)], 3)
        ((0, 2), (1, 2))
    """
    if edges is None:
        return chain(num_stages)
    found = set()
    for producer, consumer in edges:
        if not 0 <= producer < consumer < num_stages:
            raise ScheduleError(
                f"edges: ({producer}, {consumer}) must be a producer and a consumer with "
                f"0 <= producer < consumer < {num_stages}, the number of stages; number the stages in the order "
                "in which values flow."
            )
        found.add((int(producer), int(consumer)))
    return tuple(sorted(found))
