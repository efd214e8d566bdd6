"""Who sends which block of a tensor to whom, by the layouts alone: both ends find it without a message.

A rank looks only at the shards that meet its own, so the work does not grow with the number of ranks.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._geometry import Box, Layout

__all__ = ["Route", "incoming", "outgoing"]


class Route(NamedTuple):
    """A block that one rank needs and another has."""

    source: int
    """Rank that sends it; may be the target itself."""
    target: int
    """Rank that needs it."""
    held: int
    """Number of the source's box that holds it."""
    wanted: int
    """Number of the target's box that it is part of."""
    block: Box
    """Which elements."""


def incoming(shape: tuple[int, ...], old: Layout, new: Layout, rank: int, turn: int = 0) -> list[Route]:
    """Return how a rank gets what it needs.

    A rank that holds a block takes its own; else the holders of the block take turns.

    Args:
        shape: of the whole tensor.
        old: how it is sharded.
        new: how it is to be.
        rank: the target.
        turn: which holder begins; another one for each tensor, so that small ones do not all come from one rank.

    Returns:
        Routes that make up the boxes of the rank; those from one source stand in the order of `outgoing`.

    Example:
        >>> from .._geometry import Mesh, Rule
        >>> mesh = Mesh((2,), range(2))
        >>> found = incoming((4,), Rule(mesh, ("S(0)",)), Rule(mesh, ("R",)), 0)
        >>> [(route.source, route.block.offset, route.block.shape) for route in found]
        [(0, (0,), (2,)), (1, (2,), (2,))]
    """
    found: list[Route] = []
    for wanted, want in enumerate(new.boxes(shape, rank)):
        for holders in old.overlapping(shape, want):
            source = rank
            if rank not in holders:
                place = bisect_left(_waiting(shape, old, new, holders), rank)
                source = holders[(place + turn) % len(holders)]
            found += _common(source, rank, old.boxes(shape, source), [(wanted, want)])
    return found


def outgoing(shape: tuple[int, ...], old: Layout, new: Layout, rank: int, turn: int = 0) -> list[Route]:
    """Return what a rank sends to others, by target; arguments as of `incoming`.

    Example:
        >>> from .._geometry import Mesh, Rule
        >>> mesh = Mesh((2,), range(2))
        >>> [route.target for route in outgoing((4,), Rule(mesh, ("S(0)",)), Rule(mesh, ("R",)), 0)]
        [1]
    """
    boxes = old.boxes(shape, rank)
    if not boxes:
        return []
    found: list[Route] = []
    holders = old.holders(shape, rank)
    mine = (holders.index(rank) - turn) % len(holders)
    for target in _waiting(shape, old, new, holders)[mine :: len(holders)]:
        found += _common(rank, target, boxes, list(enumerate(new.boxes(shape, target))))
    return found


@functools.lru_cache(maxsize=4096)
def _waiting(shape: tuple[int, ...], old: Layout, new: Layout, holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that need something of a shard and do not hold it, rising."""
    served = frozenset(holders)
    if served.issuperset(new.ranks()):
        return ()
    found: set[int] = set()
    for box in old.boxes(shape, holders[0]):
        for group in new.overlapping(shape, box):
            found.update(group)
    return tuple(sorted(found - served))


def _common(source: int, target: int, have: Sequence[Box], want: Sequence[tuple[int, Box]]) -> Iterator[Route]:
    for wanted, needed in want:
        for held, box in enumerate(have):
            block = box.intersect(needed)
            if block is not None:
                yield Route(source, target, held, wanted, block)
