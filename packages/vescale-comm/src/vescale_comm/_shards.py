"""A tensor that is this rank's run of a whole one, and its layout as the other packages of this family read it.

A run is elements `start` to `stop` in storage order. In coordinates of the whole it is a few boxes, so a checkpoint
knows names, shapes and boxes only, never a buffer or its padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Box", "ShardLayout", "ShardTensor", "Whole", "layout_of_shard", "run_boxes", "whole_of"]


class Box(NamedTuple):
    """A block of the whole tensor."""

    offset: tuple[int, ...]
    """Its first element."""
    shape: tuple[int, ...]
    """Its length in every dim."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Whole:
    """The tensor of which parts are held, and the boxes of it that this rank would hold without this package."""

    shape: tuple[int, ...]
    """Shape of the whole."""
    boxes: tuple[Box, ...]
    """For a plain tensor one box, all of it; for a sharded one what this rank has, in storage order."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How this rank's part lies in the whole tensor."""

    global_shape: tuple[int, ...]
    """Shape of the whole."""
    global_stride: tuple[int, ...]
    """Strides that the whole would have on one device."""
    boxes: list[Box]
    """The local elements, in storage order."""
    local: Tensor
    """The local part, one-dimensional; shares memory."""
    replicas: tuple[int, int]
    """Which copy of these boxes this is, of how many."""
    partial: bool
    """Whether the value is a pending sum over ranks; never."""


class ShardTensor(Tensor):
    """A one-dimensional tensor that knows which elements of a whole tensor it holds.

    Operators return plain tensors. It shares memory with what it was made of.

    Example:
        >>> part = ShardTensor.make(torch.arange(4.0), Whole((2, 3), (Box((0, 0), (2, 3)),)), 1, 5)
        >>> part.shape, part.global_shape, [tuple(box) for box in part.boxes]
        (torch.Size([4]), (2, 3), [((0, 1), (1, 2)), ((1, 0), (1, 2))])
    """

    # Of torch; without it operators would return this class, with the layout of nothing.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    global_shape: tuple[int, ...]
    """Shape of the whole."""
    boxes: tuple[Box, ...]
    """The local elements in coordinates of the whole, in storage order."""

    @staticmethod
    def make(local: Tensor, whole: Whole, start: int, stop: int) -> ShardTensor:
        """Label a tensor.

        Args:
            local: one-dimensional, `stop - start` elements.
            whole: of what it is a part.
            start: first element, counted through the boxes of `whole`.
            stop: first element behind them.
        """
        if start == stop:  # without elements two parameters would be the same memory, which checkpoints take for a tie
            local = local.new_empty(0)
        return ShardTensor.of_boxes(local, whole.shape, run_boxes(whole.boxes, start, stop))

    @staticmethod
    def of_boxes(local: Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> ShardTensor:
        """Label a tensor that holds the given boxes of a tensor of `shape`."""
        made: ShardTensor = torch.Tensor._make_subclass(ShardTensor, local.detach())
        made.global_shape, made.boxes = tuple(shape), tuple(boxes)
        return made

    def plain(self) -> Tensor:
        """Return the local elements as a plain tensor that shares memory."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        made = memo.get(id(self))
        if made is None:
            made = memo[id(self)] = ShardTensor.of_boxes(self.plain().clone(), self.global_shape, self.boxes)
        assert isinstance(made, ShardTensor)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardTensor({self.plain().numel()} of {list(self.global_shape)}, {self.plain()!r})"


# So that torch.load reads saved states of ours with weights_only=True, its default.
torch.serialization.add_safe_globals([ShardTensor, Box])


def layout_of_shard(tensor: Tensor) -> ShardLayout | None:
    """Return the layout of a `ShardTensor`; None for other tensors. Communicates nothing."""
    if not isinstance(tensor, ShardTensor):
        return None
    shape, strides = tensor.global_shape, [1] * len(tensor.global_shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return ShardLayout(shape, tuple(strides), list(tensor.boxes), tensor.plain(), (0, 1), False)


def whole_of(shape: Sequence[int]) -> Whole:
    """Return the description of a plain tensor.

    Example:
        >>> whole_of((2, 3)).boxes
        (Box(offset=(0, 0), shape=(2, 3)),)
    """
    shape = tuple(int(size) for size in shape)
    return Whole(shape, (Box((0,) * len(shape), shape),))


def run_boxes(boxes: Sequence[Box], start: int, stop: int) -> tuple[Box, ...]:
    """Return elements `start` to `stop`, counted through `boxes`, as boxes; at most `2 * ndim - 1` of each.

    Example:
        >>> [tuple(box) for box in run_boxes([Box((10, 0), (3, 4))], 2, 9)]
        [((10, 2), (1, 2)), ((11, 0), (1, 4)), ((12, 0), (1, 1))]
    """
    found: list[Box] = []
    begin = 0
    for box in boxes:
        end = begin + box.numel
        if start < end and begin < stop:
            found += _of_one(box, max(start - begin, 0), min(stop, end) - begin)
        begin = end
    return tuple(found)


def _of_one(box: Box, start: int, stop: int) -> list[Box]:
    """Cut a run into the largest boxes, from its beginning on."""
    ndim = len(box.shape)
    rows = [math.prod(box.shape[dim + 1 :]) for dim in range(ndim)]
    found = []
    while start < stop:
        # The outermost dim in which a whole row begins here and fits.
        dim = 0
        while dim < ndim and (start % rows[dim] or start + rows[dim] > stop):
            dim += 1
        if dim == ndim:
            return [Box(box.offset, box.shape)]  # of dim 0, the only case in which no dim is left
        index = [start // rows[d] % box.shape[d] for d in range(ndim)]
        count = min((stop - start) // rows[dim], box.shape[dim] - index[dim])
        offset = tuple(o + i for o, i in zip(box.offset, index, strict=True))
        found.append(Box(offset, (1,) * dim + (count,) + box.shape[dim + 1 :]))
        start += count * rows[dim]
    return found
