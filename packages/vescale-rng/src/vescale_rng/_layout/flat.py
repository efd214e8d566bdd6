"""Flat ranges: the local part is a run of the elements in logical (row-major) order, kept as one dense piece.

ZeRO-style buffers and ragged shards cut tensors so. A run of a d-dimensional tensor is at most `2 * d - 1` boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from ..errors import LayoutError
from .intervals import Intervals, box_of, length, select
from .part import Box, Part, contiguous_stride, integers


def part_of_flat(global_shape: Sequence[int], start: int, stop: int, stride: Sequence[int] | None = None) -> Part:
    """Return the part that holds the elements `whole.flatten()[start:stop]`, as a dense 1-D tensor.

    Args:
        global_shape: shape of the whole tensor.
        start: first element, counted in logical (row-major) order whatever the strides are.
        stop: one past the last element.
        stride: strides of the whole tensor on one device, in elements; contiguous if None.

    Raises:
        LayoutError: for a range that is not inside the tensor.

    Example:
        >>> part_of_flat((3, 4), 2, 9).boxes
        (Box(offset=(0, 2), shape=(1, 2)), Box(offset=(1, 0), shape=(1, 4)), Box(offset=(2, 0), shape=(1, 1)))
    """
    shape = integers("global_shape", global_shape)
    start, stop = integers("start, stop", (start, stop))
    if not start <= stop <= math.prod(shape):
        raise LayoutError(
            f"start, stop: the range {start}:{stop} is not inside the {math.prod(shape)} elements of shape {shape}."
        )
    strides = contiguous_stride(shape) if stride is None else integers("stride", stride)
    return Part(shape, strides, (stop - start,), tuple(flat_boxes(shape, start, stop)), None)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes of the flat range `start:stop` of a tensor of `shape`, in order.

    Example:
        >>> flat_boxes((3, 4), 4, 12)
        [Box(offset=(1, 0), shape=(2, 4))]
    """
    if start >= stop:
        return []
    steps = contiguous_stride(shape)
    boxes = []
    while start < stop:
        # The largest box that begins here: of the outermost dim of which `start` begins a row and a row is left.
        dim = 0
        while dim < len(shape) and (start % steps[dim] or start + steps[dim] > stop):
            dim += 1
        offset = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        if dim == len(shape):  # 0-d
            boxes.append(Box((), ()))
            break
        rows = min((stop - start) // steps[dim], shape[dim] - offset[dim])
        boxes.append(Box(offset, (1,) * dim + (rows,) + shape[dim + 1 :]))
        start += rows * steps[dim]
    return boxes


def part_of_flat_intervals(
    global_shape: tuple[int, ...],
    global_stride: tuple[int, ...] | None,
    per_dim: Sequence[Intervals],
    leading: int,
    start: int,
    stop: int,
) -> Part:
    """Return the part that holds a flat range of a tensor that is itself a product of intervals.

    Args:
        global_shape: shape of the whole tensor.
        global_stride: its strides in elements; contiguous if None.
        per_dim: the intervals that are left of each dim before the flat cut.
        leading: number of leading dims that the range counts over.
        start: first row of those, flattened.
        stop: one past the last row.
    """
    shape = tuple(map(length, per_dim))
    rows = flat_boxes(shape[:leading], start, stop)
    trailing = [(0, size) for size in shape[leading:]]
    boxes: list[Box] = []
    for row in rows:
        ranges = [(o, o + s) for o, s in zip(row.offset, row.shape, strict=True)] + trailing
        pieces = [select(intervals, [r]) for intervals, r in zip(per_dim, ranges, strict=True)]
        boxes += map(box_of, product(*_in_storage_order(pieces)))
    local_shape = ((stop - start) * math.prod(shape[leading:]),)
    strides = contiguous_stride(global_shape) if global_stride is None else global_stride
    return Part(global_shape, strides, local_shape, tuple(boxes), None)


def _in_storage_order(pieces: Sequence[Intervals]) -> list[Intervals]:
    """Cut the intervals until their combinations, taken in order, are each one dense run of the local storage.

    Where a dim is in several intervals, the dims outside of it can only be taken index by index.
    """
    torn = max((dim for dim, intervals in enumerate(pieces) if len(intervals) > 1), default=0)
    return [
        tuple((i, i + 1) for start, stop in intervals for i in range(start, stop)) if dim < torn else intervals
        for dim, intervals in enumerate(pieces)
    ]
