"""Integers in a range: which one torch's `random_` means, and multiply-high of 64 random bits by its size.

int64 arithmetic wraps, so unsigned 64-bit products are made of 32-bit halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import RandomError

__all__ = ["multiply_high", "random_range", "scale_to_range"]

_MASK = 0xFFFFFFFF
_LARGEST = (1 << 63) - 1


def _digits(dtype: torch.dtype) -> int:
    """Bits of the significand: integers up to 2**digits are exact."""
    return 1 - round(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())


def random_range(dtype: torch.dtype, start: Any, end: Any) -> tuple[int, int, float, float]:
    """Return what `random_(start, end)` draws.

    Without arguments: `0 ... 2**digits` for floating dtypes, `0 ... max` for integers. With `end` None and a `start`:
    `start ... max`.

    Returns:
        Lowest integer, number of integers, and the smallest and largest number of a floating dtype that lie within
        (a large integer may be rounded out of the range).

    >>> random_range(torch.int8, None, None), random_range(torch.float16, 0, 10)
    ((0, 128, 0.0, 0.0), (0, 10, 0.0, 9.0))
    """
    floating = dtype.is_floating_point
    if floating:
        lowest, highest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype == torch.bool:
        lowest, highest = 0, 1
    else:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if start is None and end is None:
        if floating:
            return 0, (1 << _digits(dtype)) + 1, 0.0, float(torch.finfo(dtype).max)
        return 0, highest + 1, 0.0, 0.0
    low = 0 if start is None else int(start)
    high = int(end) if end is not None else min(highest, _LARGEST) + 1
    if low >= high:
        raise RandomError(f"random_ expects 'from' to be less than 'to', got from={low} >= to={high}")
    if not lowest <= low <= highest or not lowest <= high - 1 <= highest:
        raise RandomError(f"random_ expects from={low} and to - 1 = {high - 1} to be within {dtype}")
    if not floating:
        return low, high - low, 0.0, 0.0
    return low, high - low, _inside(low, dtype, low, high - 1), _inside(high - 1, dtype, low, high - 1)


def _inside(value: int, dtype: torch.dtype, low: int, high: int) -> float:
    """The number of a floating dtype next to `value`, towards the range if rounding leaves it."""
    near = torch.tensor(value, dtype=torch.int64).to(torch.float32 if dtype != torch.float64 else dtype).to(dtype)
    up = torch.tensor(float("inf"), dtype=dtype)
    if int(near) < low:
        near = torch.nextafter(near, up)
    elif int(near) > high:
        near = torch.nextafter(near, -up)
    return float(near)


def scale_to_range(high: Tensor, low: Tensor, size: int) -> Tensor:
    """Return `(high * 2**32 + low) * size >> 64`, as an int64 that may have wrapped around.

    Args:
        high: int64, values below 2**32; overwritten.
        low: likewise.
        size: 1 <= size <= 2**64.

    >>> scale_to_range(torch.tensor([1 << 31]), torch.tensor([0]), 10)
    tensor([5])
    """
    if size <= 1 << 32:
        carry = low.mul_(size).bitwise_right_shift_(32)
        if size < 1 << 31:  # the sum is below 2**63, and its shift brings in zeros
            return high.mul_(size).add_(carry.bitwise_and_(_MASK)).bitwise_right_shift_(32)
        return high.mul_(size).add_(carry.bitwise_and_(_MASK)).bitwise_right_shift_(32).bitwise_and_(_MASK)
    if size == 1 << 64:
        return high.bitwise_left_shift_(32).bitwise_or_(low)
    return multiply_high(high, low, size >> 32, size & _MASK)


def multiply_high(high: Tensor, low: Tensor, size_high: Tensor | int, size_low: Tensor | int) -> Tensor:
    """Return the upper half of the product of two 64-bit numbers, each given as two halves below 2**32.

    >>> multiply_high(torch.tensor([1 << 31]), torch.tensor([0]), 1, 6)
    tensor([2147483651])
    """
    carry = torch.mul(low, size_low).bitwise_right_shift_(32).bitwise_and_(_MASK)
    first = torch.mul(high, size_low).add_(carry)
    second = low.mul_(size_high).add_(torch.bitwise_and(first, _MASK))
    first.bitwise_right_shift_(32).bitwise_and_(_MASK)
    second.bitwise_right_shift_(32).bitwise_and_(_MASK)
    return high.mul_(size_high).add_(first).add_(second)
