"""Who sends which block of a tensor to whom, by the layouts alone: every rank finds the same routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._geometry import Box, Layout

__all__ = ["Route", "routes"]


class Route(NamedTuple):
    """A block that one rank needs and another has."""

    source: int
    """Rank that sends it; may be the same one."""
    target: int
    """Rank that needs it."""
    held: int
    """Number of the source's box that holds it."""
    wanted: int
    """Number of the target's box that it is part of."""
    block: Box
    """Which elements."""


def routes(shape: tuple[int, ...], old: Layout, new: Layout, targets: Sequence[int]) -> Iterator[Route]:
    """Yield the blocks that the ranks in `targets` need, in an order that all ranks agree on.

    A rank that holds a block itself is its source; else the holders take turns by the number of the target.

    Args:
        shape: of the whole tensor.
        old: how it is sharded.
        new: how it is to be.
        targets: the ranks to be served, rising.
    """
    for target in targets:
        for wanted, want in enumerate(new.boxes(shape, target)):
            for holders in old.overlapping(shape, want):
                source = target if target in holders else holders[target % len(holders)]
                for held, have in enumerate(old.boxes(shape, source)):
                    block = have.intersect(want)
                    if block is not None:
                        yield Route(source, target, held, wanted, block)
