"""Whether pieces that were found for a box overlap: together with their number of elements this tells exact cover."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._geometry import Box, Piece

__all__ = ["disjoint"]


def disjoint(target: Box, runs: Sequence[tuple[int, int]], blocks: Sequence[Box]) -> bool:
    """Tell whether no element of a box is held twice.

    Args:
        target: the box.
        runs: elements of it, in row-major order, as (start, stop).
        blocks: boxes inside of it.

    Example:
        >>> disjoint(Box((0, 0), (4, 4)), [(0, 8)], [Box((2, 0), (2, 4))])
        True
        >>> disjoint(Box((0, 0), (4, 4)), [(0, 9)], [Box((2, 0), (2, 4))])
        False
    """
    ordered = sorted(runs)
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(ordered)):
        return False
    if not blocks:
        return True
    everything = [*blocks, *(block for low, high in ordered for block in Piece(target, low, high).boxes())]
    # Sweep along the dim in which most of the boxes begin at different places: few are open at a time.
    dim = max(range(target.ndim), key=lambda dim: len({block.offset[dim] for block in everything}))
    opened: list[Box] = []
    for block in sorted(everything, key=lambda block: block.offset[dim]):
        opened = [other for other in opened if other.offset[dim] + other.shape[dim] > block.offset[dim]]
        if any(other.intersect(block) is not None for other in opened):
            return False
        opened.append(block)
    return True
