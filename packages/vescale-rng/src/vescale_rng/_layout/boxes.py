"""Parts that a caller describes: by slices of the whole tensor, or by boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from ..errors import LayoutError
from .intervals import Intervals, part_of_intervals
from .part import Box, Part, check_inside, contiguous_stride, integers


def part_of_slices(
    global_shape: Sequence[int], slices: Sequence[slice | Sequence[slice]], stride: Sequence[int] | None = None
) -> Part:
    """Return the part that holds `whole[slices]`.

    Args:
        global_shape: shape of the whole tensor.
        slices: per dim a slice of step 1, or a list of such slices that stand one after the other in the local dim.
            Negative bounds count from the end, as everywhere in Python; bounds outside of the dim are an error.
        stride: strides of the whole tensor on one device, in elements; contiguous if None.

    Raises:
        LayoutError: for a wrong number of slices, a step, a bound outside of its dim, or slices that overlap.

    Example:
        >>> part_of_slices((4, 6), [slice(0, 2), [slice(0, 2), slice(4, 6)]]).local_shape
        (2, 4)
    """
    shape = integers("global_shape", global_shape)
    strides = None if stride is None else integers("stride", stride)
    if not isinstance(slices, Sequence) or len(slices) != len(shape):
        raise LayoutError(f"slices: a tensor of shape {shape} needs {len(shape)}, one per dim; got {slices!r}.")
    return part_of_intervals(
        shape,
        strides,
        [_intervals(dim, size, chosen) for dim, (size, chosen) in enumerate(zip(shape, slices, strict=True))],
    )


def part_of_boxes(
    global_shape: Sequence[int],
    boxes: Iterable[Box | tuple[Sequence[int], Sequence[int]]],
    stride: Sequence[int] | None = None,
) -> Part:
    """Return the part that holds `boxes`, one after the other in a contiguous local tensor.

    Args:
        global_shape: shape of the whole tensor.
        boxes: boxes or (offset, shape) pairs in the order of the local storage. For a single box the local tensor has
            its shape; for several it is 1-D.
        stride: strides of the whole tensor on one device, in elements; contiguous if None.

    Raises:
        LayoutError: for boxes outside of the tensor, boxes that overlap, or wrong lengths or numbers.

    Example:
        >>> part_of_boxes((4, 4), [Box((0, 2), (4, 2))]).local_shape
        (4, 2)
        >>> part_of_boxes((4, 4), [((0, 0), (1, 4)), ((3, 0), (1, 2))]).local_shape
        (6,)
    """
    shape = integers("global_shape", global_shape)
    strides = contiguous_stride(shape) if stride is None else integers("stride", stride)
    found = [_box(box) for box in boxes]
    held = tuple(box for box in found if box.numel)
    if len(found) != 1:
        for box in found:
            check_inside(box, shape)
        return Part(shape, strides, (sum(box.numel for box in held),), held, None)
    check_inside(found[0], shape)
    windows = tuple(tuple((0, size) for size in box.shape) for box in held)
    return Part(shape, strides, found[0].shape, held, windows)


def _box(box: Box | tuple[Sequence[int], Sequence[int]]) -> Box:
    try:
        offset, shape = (box.offset, box.shape) if isinstance(box, Box) else box
    except (TypeError, ValueError):
        raise LayoutError(f"boxes: expected boxes or (offset, shape) pairs, but got {box!r}.") from None
    return Box(integers("boxes: offset", offset), integers("boxes: shape", shape))


def _intervals(dim: int, size: int, chosen: slice | Sequence[slice]) -> Intervals:
    if isinstance(chosen, range):
        raise LayoutError(
            f"slices[{dim}]: expected a slice of step 1, but got {chosen!r}; write slice({chosen.start}, "
            f"{chosen.stop}). A range alone, in place of all slices, counts over the flattened tensor."
        )
    found: list[tuple[int, int]] = []
    for one in chosen if isinstance(chosen, Sequence) else [chosen]:
        if not isinstance(one, slice) or one.step not in (None, 1):
            raise LayoutError(f"slices[{dim}]: expected slices of step 1, but got {one!r}.")
        start = _bound(dim, size, one.start, 0)
        stop = max(start, _bound(dim, size, one.stop, size))
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _bound(dim: int, size: int, given: Any, default: int) -> int:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise LayoutError(f"slices[{dim}]: expected integers as bounds, but got {given!r}.")
    bound = int(given) + (size if given < 0 else 0)
    if not 0 <= bound <= size:
        raise LayoutError(f"slices[{dim}]: bound {given} is outside of a dim of size {size}.")
    return bound
