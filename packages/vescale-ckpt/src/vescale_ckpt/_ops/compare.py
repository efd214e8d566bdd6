"""Compare two tensors bit by bit and as numbers, a bounded number of elements at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._geometry import Box

__all__ = ["Distance", "blocks_of", "distance"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(slots=True)
class Distance:
    """How far two tensors are apart."""

    elements: int = 0
    """Number of elements."""
    different: int = 0
    """Number of those that are not the same bits."""
    max_abs: float = 0.0
    """Largest absolute difference; NaN where an element is NaN in one tensor only, or where the dtype is no number."""
    sum_abs: float = 0.0
    """Sum of the absolute differences."""

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference over all elements."""
        return self.sum_abs / self.elements if self.elements else 0.0


def blocks_of(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements, in row-major order.

    Example:
        >>> [block.shape for block in blocks_of(Box((0, 0), (5, 4)), 8)]
        [(2, 4), (2, 4), (1, 4)]
        >>> [block.shape for block in blocks_of(Box((0, 0), (2, 4)), 3)]
        [(1, 3), (1, 1), (1, 3), (1, 1)]
    """
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    inner = math.prod(box.shape[dim + 1 :])
    rows = max(1, most // inner)
    for begin in range(0, box.shape[dim], rows):
        size = min(rows, box.shape[dim] - begin)
        offset = (*box.offset[:dim], box.offset[dim] + begin, *box.offset[dim + 1 :])
        yield from blocks_of(Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :])), most)


def distance(
    read_a: Callable[[Box], Tensor],
    read_b: Callable[[Box], Tensor],
    shape: tuple[int, ...],
    most: int,
    progress: Callable[[int], None] | None = None,
) -> Distance:
    """Return how far two tensors of one shape and dtype are apart.

    Args:
        read_a: returns a box of the first, on the CPU.
        read_b: returns a box of the second.
        shape: of both.
        most: elements that are read at a time.
        progress: called with the elements of each block.
    """
    found = Distance()
    for box in blocks_of(Box.whole(shape), most):
        add(found, read_a(box), read_b(box))
        if progress is not None:
            progress(box.numel)
    return found


def add(found: Distance, a: Tensor, b: Tensor) -> None:
    """Count one block."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    found.elements += a.numel()
    different = _different(a, b)
    count = int(different.sum())
    if not count:
        return
    found.different += count
    try:
        x, y = _numbers(a[different]), _numbers(b[different])
    except (RuntimeError, NotImplementedError):  # a dtype that torch cannot convert, like two packed 4-bit numbers
        found.max_abs = found.sum_abs = math.nan
        return
    gap = (x - y).abs()
    gap[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities, and NaNs of other bits
    found.sum_abs += float(gap.sum())
    largest = float(gap.max()) if not bool(gap.isnan().any()) else math.nan
    if math.isnan(largest) or largest > found.max_abs:
        found.max_abs = largest if not math.isnan(found.max_abs) else math.nan


def _different(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    if a.element_size() == 16:
        return (_words(a) != _words(b)).any(-1)
    bits = _BITS[a.element_size()]
    return a.view(bits) != b.view(bits)


def _words(a: Tensor) -> Tensor:
    return torch.view_as_real(a).view(torch.int64)


def _numbers(a: Tensor) -> Tensor:
    if a.is_complex():
        return a.to(torch.complex128)
    if a.dtype in _UNSIGNED:
        return a.to(torch.float64)
    return a.to(torch.float32).to(torch.float64) if a.element_size() == 1 else a.to(torch.float64)
