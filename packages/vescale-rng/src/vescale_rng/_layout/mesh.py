"""Mesh and placements -> part.

Mesh axes cut the tensor from left to right, each what the axes before it have left, as torch does. A ragged axis cuts
the leading dims flattened, so nothing may cut those dims after it; cuts of the other dims commute with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..errors import LayoutError
from .flat import part_of_flat_intervals
from .intervals import Intervals, chunk, chunk_of_each, length, part_of_intervals, select
from .part import Part, integers
from .placements import Cut, cut_of


def part_of_mesh(
    global_shape: Sequence[int],
    mesh: Any,
    placements: Sequence[Any],
    stride: Sequence[int] | None = None,
    coordinate: Sequence[int] | None = None,
) -> Part:
    """Return the part that one rank of a mesh holds.

    Args:
        global_shape: shape of the whole tensor.
        mesh: a `DeviceMesh`; with `coordinate` also the sizes of its axes, which needs no process group.
        placements: one per mesh axis, as for `distribute_tensor`; also torch's `_StridedShard`, interleaved placements
            (`dim`, `interleave`: the dim is so many equal blocks, each cut on its own) and ragged ones (`dims`,
            `local_units`: the leading dims flattened and cut in proportion; the local tensor is 1-D).
        stride: strides of the whole tensor on one device, in elements; contiguous if None.
        coordinate: place of the rank in the mesh, one index per axis; that of this process if None.

    Raises:
        LayoutError: for a partial placement, a rank outside of the mesh, or lengths and numbers that do not fit.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> part_of_mesh((5, 4), (2, 2), [Shard(0), Replicate()], coordinate=(1, 0)).boxes
        (Box(offset=(3, 0), shape=(2, 4)),)
    """
    shape = integers("global_shape", global_shape)
    strides = None if stride is None else integers("stride", stride)
    sizes, at = _place(mesh, coordinate)
    return part_of_axes(shape, strides, sizes, at, placements, range(len(sizes)))


def part_of_axes(
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Sequence[Any],
    order: Sequence[int],
) -> Part:
    """Return the part of the rank at `coordinate`, where the mesh axes cut the tensor in `order`.

    Raises:
        LayoutError: as `part_of_mesh`.
    """
    if isinstance(placements, str) or not isinstance(placements, Sequence):
        raise LayoutError(f"placements: expected a sequence with one per mesh axis, but got {placements!r}.")
    if len(placements) != len(sizes):
        raise LayoutError(
            f"placements: a mesh of {len(sizes)} axes needs {len(sizes)} placements, but got {len(placements)}: "
            f"{tuple(placements)!r}."
        )
    cuts = (cut_of(placements[axis], axis, len(shape)) for axis in order)
    return _part_of_cuts(shape, stride, sizes, coordinate, tuple(cut for cut in cuts if cut is not None))


def place_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axis sizes of a `DeviceMesh` and the coordinate of this process in it.

    Raises:
        LayoutError: if this process is not in the mesh.
    """
    sizes = tuple(mesh.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(
            f"mesh: this process is not in the mesh {mesh!r}, so it holds no part of the tensor. Run random operators "
            f"on its members only, or advance the generator here (`vescale_rng.advance`) to stay in step with them."
        )
    return sizes, tuple(coordinate)


def _place(mesh: Any, coordinate: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    is_device_mesh = hasattr(mesh, "get_coordinate")
    if coordinate is None:
        if not is_device_mesh:
            raise LayoutError(f"coordinate: needed where mesh is not a DeviceMesh but the sizes {mesh!r}.")
        return place_of(mesh)
    sizes = integers("mesh", mesh.shape if is_device_mesh else mesh)
    at = integers("coordinate", coordinate)
    if len(at) != len(sizes) or any(index >= size for index, size in zip(at, sizes, strict=True)):
        raise LayoutError(f"coordinate: {at} is not inside of a mesh of sizes {sizes}.")
    return sizes, at


@functools.lru_cache(maxsize=4096)
def _part_of_cuts(
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[Cut, ...],
) -> Part:
    per_dim: list[Intervals] = [((0, size),) if size else () for size in shape]
    ragged: tuple[int, int, int] | None = None  # leading dims, and the rows of them that are left
    for cut in cuts:
        count, index = sizes[cut.axis], coordinate[cut.axis]
        if cut.units is not None:
            ragged = _ragged(cut, count, index, per_dim, ragged)
            continue
        if ragged is not None and cut.dim < ragged[0]:
            raise LayoutError(
                f"placements[{cut.axis}]: dim {cut.dim} is flattened by a ragged shard on an earlier mesh axis and "
                f"cannot be cut after it. Put the ragged shard on a later axis, or shard another dim."
            )
        intervals = per_dim[cut.dim]
        size = length(intervals)
        if cut.equal and size % cut.blocks:
            raise LayoutError(
                f"placements[{cut.axis}]: an interleaved shard needs dim {cut.dim} in {cut.blocks} equal blocks, but "
                f"{size} elements of it are left to cut."
            )
        kept = [chunk(size, count, index)] if cut.blocks == 1 else chunk_of_each(size, cut.blocks, count, index)
        per_dim[cut.dim] = select(intervals, kept)
    if ragged is None:
        return part_of_intervals(shape, stride, per_dim)
    return part_of_flat_intervals(shape, stride, per_dim, *ragged)


def _ragged(
    cut: Cut, count: int, index: int, per_dim: list[Intervals], before: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    units = cut.units or ()
    if len(units) != count:
        raise LayoutError(
            f"placements[{cut.axis}]: local_units {units} needs one number for each of the {count} ranks of the axis."
        )
    if before is not None and before[0] != cut.dim:
        raise LayoutError(f"placements[{cut.axis}]: two ragged shards of one tensor must flatten the same dims.")
    _, start, stop = before or (cut.dim, 0, math.prod(map(length, per_dim[: cut.dim])))
    total = sum(units)
    if stop - start and (not total or (stop - start) % total):
        raise LayoutError(
            f"placements[{cut.axis}]: local_units {units} are {total} units in all, which do not divide the "
            f"{stop - start} rows of the {cut.dim} leading dims."
        )
    unit = (stop - start) // total if total else 0
    stops = list(accumulate(units, initial=0))
    return cut.dim, start + unit * stops[index], start + unit * stops[index + 1]
