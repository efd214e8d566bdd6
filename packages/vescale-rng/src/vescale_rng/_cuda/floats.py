"""Floating-point steps of the GPU's kernels, exactly rounded: curand's uniforms, and fused multiply-add.

nvcc contracts `a * b + c` into one rounding. A product of two float32 is exact in float64, and rounding the sum to odd
before the last rounding makes that one right too (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
2008); float64 needs error-free transformations first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fma", "round_to", "uniform32", "uniform64"]


def round_to(value: float, dtype: torch.dtype) -> float:
    """Round a number to a floating-point type, as a cast in C does."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def uniform32(word: Tensor) -> Tensor:
    """Float32 uniform of curand, in (0, 1]: fma(float(word), 2**-32, 2**-33).

    The product is exact and the float64 sum too, so the cast is the only rounding.
    """
    return word.to(torch.float64).to(torch.float32).to(torch.float64).mul_(2.0**-32).add_(2.0**-33).to(torch.float32)


def uniform64(low: Tensor, high: Tensor) -> Tensor:
    """Float64 uniform of curand, in (0, 1]: 53 bits of two words, plus half a step."""
    return (low ^ (high << 21)).to(torch.float64).mul_(2.0**-53).add_(2.0**-54)


def fma(a: Tensor, b: float, c: float) -> Tensor:
    """Return a * b + c with one rounding.

    Args:
        a: float32 or float64.
        b: of the type of `a`.
        c: of the type of `a`.
    """
    if b == 1.0:
        return a + c
    if a.dtype == torch.float32:
        product = a.to(torch.float64) * b
        return _sum_to_odd(product, torch.full_like(product, c)).to(torch.float32)
    high, low = _product(a, torch.full_like(a, b))
    carry, rest = _two_sum(torch.full_like(a, c), low)
    top, error = _two_sum(high, carry)
    return top + _sum_to_odd(rest, error)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what rounding took away (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of 26 bits (Dekker)."""
    scaled = a * (2.0**27 + 1.0)
    high = scaled - (scaled - a)
    return high, a - high


def _product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded product, and what rounding took away (Dekker)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Round a + b to odd: of the two neighbours of an inexact sum, the one with an odd last bit."""
    total, error = _two_sum(a, b)
    bits = total.view(torch.int64)
    # Consecutive bit patterns are neighbours in magnitude: away from zero where the error has the sign of the sum.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_even = (error != 0) & ((bits & 1) == 0)
    return torch.where(inexact_even, bits + step, bits).view(torch.float64)
