"""Tensors without a rule: the boxes of all ranks put together, and whether they make up the tensor.

Exact cover is told from corners: the number of boxes that hold an element is 1 everywhere exactly if the corners of all
boxes, with the signs of their mixed differences, cancel but for those of the whole. That takes no pairs of boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._geometry import Box, Explicit
from .._words import counted
from ..errors import LayoutError, RanksError
from .nodes import ABSENT, local_names
from .tensors import TensorSpec
from .tree import Packed

__all__ = ["covers", "join_boxes", "own_boxes", "renumber_local"]

SIGNED_DIMS = 12
"""Dims that are cut, up to which corners are counted; a box has two to the power of their number."""


def own_boxes(specs: Sequence[TensorSpec], rank: int, names: Collection[str] = ()) -> dict[str, list[Any]]:
    """Return what a rank holds of the tensors without a rule, as JSON by name.

    Args:
        specs: of this rank.
        rank: its number.
        names: tensors that have no rule on another rank, so that the boxes of this rank's rule are told.

    Example:
        >>> from .._geometry import Mesh, Rule
        >>> own_boxes([TensorSpec("w", "float32", (4,), Rule(Mesh((2,), range(2)), ("S(0)",)))], 1, ["w"])
        {'w': [[[2], [2]]]}
    """
    return {
        spec.name: [[list(box.offset), list(box.shape)] for box in spec.layout.boxes(spec.shape, rank)]
        for spec in specs
        if isinstance(spec.layout, Explicit) or spec.name in names
    }


def join_boxes(specs: Sequence[TensorSpec], per_rank: Sequence[Mapping[str, Any]]) -> list[TensorSpec]:
    """Return the specs with the boxes of all ranks.

    Args:
        specs: of the whole state.
        per_rank: what `own_boxes` returned on each rank.

    Raises:
        LayoutError: the boxes of a tensor do not make it up, each element once; names the tensor and ranks.

    Example:
        >>> half = [TensorSpec("w", "float32", (4,), Explicit(((0, (Box((0,), (2,)),)),)))]
        >>> join_boxes(half, [{"w": [[[0], [2]]]}, {"w": [[[2], [2]]]}])[0].layout.ranks()
        [0, 1]
    """
    joined = []
    for spec in specs:
        if isinstance(spec.layout, Explicit):
            parts = []
            for rank, said in enumerate(per_rank):
                boxes = tuple(Box(tuple(offset), tuple(shape)) for offset, shape in said.get(spec.name, ()))
                if boxes:
                    parts.append((rank, boxes))
            layout = Explicit(tuple(parts))
            layout.check(spec.shape)
            _check_cover(spec.name, spec.shape, layout)
            spec = TensorSpec(spec.name, spec.dtype, spec.shape, layout)
        joined.append(spec)
    return joined


def renumber_local(packed: Packed, tree: Any) -> list[Any]:
    """Return this rank's own values in the numbering of the merged tree, `ABSENT` where it has none.

    Args:
        packed: this rank's state.
        tree: JSON of the whole state.

    Raises:
        RanksError: keys of several ranks have one name.
    """
    own = dict(zip(packed.local_names, packed.local, strict=True))
    names = local_names(tree)
    lost = own.keys() - set(names)
    if lost:
        raise RanksError(
            f"state: {min(lost)} is a value of this rank's own, but has another name in the state of all ranks, since "
            f"another rank has a key that is spelled like it. Use different keys."
        )
    return [own.get(name, ABSENT) for name in names]


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Tell whether boxes hold every element of a tensor exactly once.

    Args:
        shape: shape of the tensor.
        boxes: boxes inside of it.

    Example:
        >>> covers((4, 4), [Box((0, 0), (4, 1)), Box((0, 1), (2, 3)), Box((2, 1), (2, 3))])
        True
        >>> covers((4,), [Box((0,), (3,)), Box((2,), (2,))])
        False
    """
    boxes = [box for box in boxes if box.numel]
    whole = Box.whole(shape)
    if whole.numel == 0 or not boxes:
        return whole.numel == 0 and not boxes
    if sum(box.numel for box in boxes) != whole.numel:
        return False
    cut = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in boxes)]
    if len(cut) > SIGNED_DIMS:
        return all(a.intersect(b) is None for a, b in itertools.combinations(boxes, 2))
    corners: dict[tuple[int, ...], int] = {}
    for box, sign in [*((box, 1) for box in boxes), (whole, -1)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            at = tuple(box.offset[dim] + end * box.shape[dim] for dim, end in zip(cut, ends, strict=True))
            left = corners.pop(at, 0) + (-sign if sum(ends) % 2 else sign)
            if left:
                corners[at] = left
    return not corners


def _check_cover(name: str, shape: tuple[int, ...], layout: Explicit) -> None:
    owners: dict[Box, list[int]] = {}
    groups: dict[Box, tuple[Box, ...]] = {}
    for rank, boxes in layout.parts:
        for box in boxes:
            if groups.setdefault(box, boxes) != boxes:
                raise LayoutError(
                    f"state: {name}: ranks {owners[box][0]} and {rank} both hold {box} of a tensor of shape {shape}, "
                    f"but not the same other boxes, in the same order. Ranks must hold equal lists of boxes, or "
                    f"disjoint ones."
                )
            if rank in owners.get(box, ()):
                raise LayoutError(f"state: {name}: rank {rank} holds {box} of a tensor of shape {shape} twice.")
            owners.setdefault(box, []).append(rank)
    if covers(shape, list(owners)):
        return
    opened: list[Box] = []
    for box in sorted(owners, key=lambda box: box.offset):
        opened = [other for other in opened if other.offset[0] + other.shape[0] > box.offset[0]]
        both = next((other for other in opened if other.intersect(box) is not None), None)
        if both is not None:
            raise LayoutError(
                f"state: {name}: rank {owners[both][0]} holds {both} and rank {owners[box][0]} holds {box} of a tensor "
                f"of shape {shape}: they overlap, but are not the same. Ranks must hold disjoint or equal boxes."
            )
        opened.append(box)
    whole, held = Box.whole(shape).numel, sum(box.numel for box in owners)
    ranks = sorted({rank for group in owners.values() for rank in group})
    raise LayoutError(
        f"state: {name}: no rank holds {whole - held} of the {whole} elements of a tensor of shape {shape}. "
        f"{counted(len(ranks), 'rank', ('holds', 'hold'))} something of it: {ranks[:8]}."
    )
