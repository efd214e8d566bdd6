"""What vescale_rng gives to vescale_dtensor: the object that draws the local part of a random operator.

It meets the contracts `RandomProvider` and `PreparingProvider` of vescale_dtensor's hookspecs without importing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from ._draw.fill import fill, scope, take
from ._draw.prepared import Prepared
from ._draw.whole import run_whole
from ._layout import Box as PartBox
from ._layout import Part, part_of_boxes
from .hookspecs import Box

__all__ = ["Provider"]


class Provider:
    """Draws box by box, in the stream that one device would use; keeps nothing."""

    def scope(self, op: str) -> Literal["local", "global"]:
        """Tell whether `op` can be drawn box by box; raise NotImplementedError if it is not known."""
        return scope(op)

    def fill(
        self,
        op: str,
        local: Tensor,
        global_shape: tuple[int, ...],
        global_stride: tuple[int, ...],
        boxes: Sequence[Box],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Fill `local` with the elements of `boxes`, in their order, and move the generator as one device would."""
        if scope(op) == "global":
            result = run_whole(op, args, kwargs)
            take(result, local, Part.whole(tuple(result.shape)))
            return
        fill(op, local, _part(global_shape, global_stride, tuple((b.offset, b.shape) for b in boxes)), args, kwargs)

    def prepare(
        self,
        op: str,
        local: Tensor,
        global_shape: tuple[int, ...],
        global_stride: tuple[int, ...],
        boxes: Sequence[Box],
    ) -> Callable[[Tensor, tuple[Any, ...], Mapping[str, Any]], None]:
        """Return a function `(local, args, kwargs)` that fills tensors like `local`."""
        part = _part(global_shape, global_stride, tuple((b.offset, b.shape) for b in boxes))
        return Prepared(op, local, part)


@functools.lru_cache(maxsize=8192)
def _part(
    shape: tuple[int, ...], stride: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> Part:
    if len(boxes) != 1:
        return part_of_boxes(shape, boxes, stride)
    ((offset, size),) = boxes
    if 0 in size:
        return Part(shape, stride, size, (), ())
    return Part(shape, stride, size, (PartBox(offset, size),), (tuple((0, s) for s in size),))
