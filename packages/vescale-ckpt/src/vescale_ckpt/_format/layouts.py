"""Layouts as JSON: meshes once, with their ranks as a start and strides where they are a grid; rules; listed boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from .._geometry import Box, Explicit, Layout, Mesh, Rule, parse_placement
from ..errors import FormatError, LayoutError
from .fields import Fields
from .jsonio import refuse
from .limits import DIMS, UINT63

__all__ = ["MAX_BOXES", "box_count", "layouts_from_json", "layouts_to_json"]

MAX_BOXES = 1 << 20
"""Boxes that one writer may hold of one tensor by a rule."""
LISTED_RANKS = 1 << 22
"""Ranks that the meshes of a file may list one by one, or 64 for each writer where that is more."""


def layouts_to_json(layouts: Sequence[Layout]) -> tuple[list[Any], list[Any]]:
    """Return (meshes, layouts) as JSON.

    Example:
        >>> layouts_to_json([Rule(Mesh((2, 4), range(8)), ("R", "S(0)"))])
        ([{'shape': [2, 4], 'start': 0, 'strides': [4, 1]}], [{'mesh': 0, 'placements': ['R', 'S(0)']}])
    """
    meshes: dict[Mesh, int] = {}
    found: list[Any] = []
    for layout in layouts:
        if isinstance(layout, Rule):
            number = meshes.setdefault(layout.mesh, len(meshes))
            found.append({"mesh": number, "placements": list(layout.placements)})
        else:
            found.append(_explicit_to_json(layout))
    return [_mesh_to_json(mesh) for mesh in meshes], found


def layouts_from_json(meshes: list[Any], layouts: list[Any], world: int, at: str) -> tuple[Layout, ...]:
    """Return the layouts that `layouts_to_json` wrote.

    Args:
        meshes: its first result, as read.
        layouts: its second result, as read.
        world: number of writers; all ranks must be smaller.
        at: name of the file, for messages.

    Raises:
        FormatError: anything that is not a layout of `world` writers.
    """
    left = max(LISTED_RANKS, 64 * world)
    read: list[Mesh] = []
    for number, value in enumerate(meshes):
        mesh = _mesh_from_json(value, world, left, f"{at}: meshes[{number}]")
        left -= 0 if isinstance(mesh.ranks, range) else len(mesh.ranks)
        read.append(mesh)
    return tuple(_layout_from_json(value, read, world, f"{at}: layouts[{n}]") for n, value in enumerate(layouts))


def box_count(layout: Layout, shape: tuple[int, ...]) -> int:
    """Return a bound of how many boxes one writer holds of a tensor of `shape`, without making them."""
    if isinstance(layout, Explicit):
        return max((len(boxes) for _, boxes in layout.parts), default=0)
    cuts = [parse_placement(text) for text in layout.placements]
    blocks = [cut for cut in cuts if cut.blocks > 1]
    bound = math.prod(cut.blocks + 1 for cut in blocks)
    for cut in cuts:
        if cut.kind == "RS":
            # Outside of a dim in several intervals, a ragged shard is taken index by index.
            torn = max((block.dim for block in blocks), default=0)
            bound *= (2 * cut.dim + 1) * max(1, math.prod(shape[:torn]))
    return bound


def _mesh_to_json(mesh: Mesh) -> dict[str, Any]:
    shape = list(mesh.shape)
    # The step along an axis, told by the second rank of it; right for all ranks or for none.
    coordinates = [[int(axis == other) for other in range(len(shape))] for axis in range(len(shape))]
    start = mesh.ranks[0]
    strides = [mesh.rank(c) - start if size > 1 else 0 for c, size in zip(coordinates, shape, strict=True)]
    if isinstance(mesh.ranks, range) or _grid(shape, start, strides) == mesh.ranks:
        return {"shape": shape, "start": start, "strides": strides}
    return {"shape": shape, "ranks": list(mesh.ranks)}


def _mesh_from_json(value: Any, world: int, left: int, at: str) -> Mesh:
    listed = isinstance(value, dict) and "ranks" in value
    fields = Fields(value, at, "shape ranks" if listed else "shape start strides")
    shape = fields.ints("shape", 1, world)
    count = 1
    for size in shape:
        count *= size
        if len(shape) > DIMS or count > world:
            refuse(fields.at("shape"), str(shape), f"must hold at most {world} ranks, the writers, in {DIMS} axes")
    ranks: Sequence[int]
    if listed:
        ranks = tuple(fields.ints("ranks", 0, world - 1, count))
    else:
        start = fields.integer("start", 0, world - 1)
        strides = fields.ints("strides", -world, world, len(shape))
        steps = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
        if start + sum(min(0, s) for s in steps) < 0 or start + sum(max(0, s) for s in steps) >= world:
            refuse(fields.at("strides"), str(strides), f"must lead to ranks from 0 to {world - 1}")
        ranks = _as_range(shape, start, strides) or ()
    if not isinstance(ranks, range):
        if count > left:
            raise FormatError(f"{at}: meshes list more than {LISTED_RANKS} ranks in all.")
        ranks = ranks or _grid(shape, start, strides)
    try:
        return Mesh(tuple(shape), ranks)
    except LayoutError as error:
        raise FormatError(f"{at}: {error}") from None


def _grid(shape: Sequence[int], start: int, strides: Sequence[int]) -> tuple[int, ...]:
    axes = [
        range(0, stride * size, stride) if stride else (0,) * size for stride, size in zip(strides, shape, strict=True)
    ]
    return tuple(start + sum(place) for place in itertools.product(*axes))


def _as_range(shape: Sequence[int], start: int, strides: Sequence[int]) -> range | None:
    """Return the ranks of a grid as a range if they are one."""
    count, step = 1, 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        step = step or stride
        if not step or stride != step * count:
            return None
        count *= size
    return range(start, start + (step or 1) * count, step or 1)


def _explicit_to_json(layout: Explicit) -> dict[str, Any]:
    ndim = next((box.ndim for _, boxes in layout.parts for box in boxes), 0)
    return {
        "ndim": ndim,
        "ranks": [rank for rank, _ in layout.parts],
        "counts": [len(boxes) for _, boxes in layout.parts],
        "boxes": [n for _, boxes in layout.parts for box in boxes for n in (*box.offset, *box.shape)],
    }


def _layout_from_json(value: Any, meshes: Sequence[Mesh], world: int, at: str) -> Layout:
    if isinstance(value, dict) and "ndim" in value:
        return _explicit_from_json(value, world, at)
    fields = Fields(value, at, "mesh placements")
    mesh = meshes[fields.integer("mesh", 0, len(meshes) - 1)]
    placements = fields.items("placements", len(mesh.shape))
    for number, text in enumerate(placements):
        if not isinstance(text, str):
            refuse(f"{fields.at('placements')}[{number}]", text, "must be a string such as 'S(0)'")
    try:
        return Rule(mesh, tuple(placements))
    except LayoutError as error:
        raise FormatError(f"{at}: {error}") from None


def _explicit_from_json(value: Any, world: int, at: str) -> Explicit:
    fields = Fields(value, at, "ndim ranks counts boxes")
    ndim = fields.integer("ndim", 0, DIMS)
    ranks = fields.ints("ranks", 0, world - 1)
    if len(set(ranks)) != len(ranks):
        refuse(fields.at("ranks"), ranks, "must name each rank once")
    numbers = fields.ints("boxes")
    counts = fields.ints("counts", 0, len(numbers) if ndim else 1, len(ranks))
    if sum(counts) * 2 * ndim != len(numbers):
        refuse(fields.at("boxes"), numbers, f"must be a list of {sum(counts) * 2 * ndim}: {sum(counts)} boxes")
    parts, begin = [], 0
    for rank, count in zip(ranks, counts, strict=True):
        boxes = []
        for _ in range(count):
            middle, end = begin + ndim, begin + 2 * ndim
            box = Box(tuple(numbers[begin:middle]), tuple(numbers[middle:end]))
            if any(stop > UINT63 for stop in box.stop):
                refuse(fields.at("boxes"), str(box), f"must end below {UINT63}")
            boxes.append(box)
            begin = end
        parts.append((rank, tuple(boxes)))
    return Explicit(tuple(parts))
