"""Logarithm, sine, cosine and exponential with the same bits on every IEEE machine and device.

Libraries and instruction sets differ in the last bits of these functions. Here they are polynomials in float64, made
of + - * /, which IEEE 754 rounds in one way only, each as a torch operation of its own so that no compiler can fuse
a multiplication with an addition. Coefficients: fdlibm (Sun Microsystems, 1993), errors below 1 ulp.
No division has a Python number below the line: torch's CUDA kernels would multiply by its rounded inverse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "COSINE",
    "EXP",
    "LN2_HIGH",
    "LN2_LOW",
    "LOG",
    "ROOT_GUESS",
    "SINE",
    "SQRT_HALF_BITS",
    "exp_",
    "horner",
    "minus_log_",
    "sincos_",
    "sqrt_",
]

LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
SQRT_HALF_BITS = 0x3FE6A09E00000000
"""Bits of a number just below sqrt(1/2), where the reduced argument of the logarithm begins."""
LOG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
SINE = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
COSINE = (
    1.0,
    -0.5,
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)
ROOT_GUESS = 0x5FE6EB50C7B537A9
EXP = (
    1.66666666666666019037e-01,
    -2.77777777770155933842e-03,
    6.61375632143793436117e-05,
    -1.65339022054652515390e-06,
    4.13813679705723846039e-08,
)


def horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return `c[0] + x*(c[1] + x*(...))`."""
    result = torch.mul(x, coefficients[-1]).add_(coefficients[-2])
    for c in coefficients[-3::-1]:
        result.mul_(x).add_(c)
    return result


def minus_log_(x: Tensor, exponent: int) -> Tensor:
    """Turn `x` into `-log(x * 2**-exponent)`.

    Args:
        x: float64, contiguous, positive normal numbers; overwritten.
        exponent: scale, so that integers can stand for fractions.

    Returns:
        `x`.

    >>> minus_log_(torch.tensor([1.0, 8.0], dtype=torch.float64), 3).tolist()
    [2.0794415416798357, 0.0]
    """
    bits = x.view(torch.int64)
    power = torch.sub(bits, SQRT_HALF_BITS).bitwise_right_shift_(52)
    bits.sub_(power, alpha=1 << 52)
    f = x.sub_(1.0)
    e = power.sub_(exponent).to(torch.float64)
    s = f / torch.add(f, 2.0)
    half_square = torch.mul(f, f).mul_(0.5)
    z = torch.mul(s, s)
    r = horner(z, LOG).mul_(z).add_(half_square).mul_(s)
    # log = e*ln2_high - ((half_square - (r + e*ln2_low)) - f), with the sign turned
    r.add_(torch.mul(e, LN2_LOW))
    half_square.sub_(r).sub_(f)
    return torch.sub(half_square, e.mul_(LN2_HIGH), out=x)


def sincos_(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sine and cosine of angles between -pi/4 and pi/4; `x` (float64) is overwritten with the sine.

    >>> [v.tolist() for v in sincos_(torch.zeros(1, dtype=torch.float64))]
    [[0.0], [1.0]]
    """
    z = torch.mul(x, x)
    return x.add_(horner(z, SINE).mul_(z).mul_(x)), horner(z, COSINE)


def sqrt_(x: Tensor) -> Tensor:
    """Turn `x` (float64, contiguous, positive normal numbers) into its square root, within 1 ulp.

    Not `torch.sqrt`: on a CPU that is the vector library's of MKL, which does not round as IEEE 754 says. These are
    Newton's steps for the inverse root, from the guess that halves the exponent.

    >>> sqrt_(torch.tensor([4.0], dtype=torch.float64)).item()
    2.0
    """
    y = torch.bitwise_right_shift(x.view(torch.int64), 1).neg_().add_(ROOT_GUESS).view(torch.float64)
    half = torch.mul(x, -0.5)
    for _ in range(3):
        y.mul_(torch.mul(y, y).mul_(half).add_(1.5))
    # The last step is one for the root itself: root + (x - root**2) * y / 2.
    root = torch.mul(x, y)
    return torch.add(root, x.sub_(torch.mul(root, root)).mul_(y.mul_(0.5)), out=x)


def exp_(x: Tensor) -> Tensor:
    """Turn `x` (float64, contiguous) into its exponential: infinity above 709.78, subnormal numbers and 0 below -708.

    >>> exp_(torch.tensor([0.0, -1000.0, 1000.0], dtype=torch.float64)).tolist()
    [1.0, 0.0, inf]
    """
    x.clamp_(-800.0, 800.0)
    k = torch.mul(x, math.log2(math.e)).round_()
    high = x.sub_(torch.mul(k, LN2_HIGH))
    low = torch.mul(k, LN2_LOW)
    r = torch.sub(high, low)
    z = torch.mul(r, r)
    c = torch.sub(r, horner(z, EXP).mul_(z))
    # exp(r) = 1 - ((low - r*c / (2 - c)) - high)
    quotient = r.mul_(c).div_(c.neg_().add_(2.0))
    y = torch.sub(high, low.sub_(quotient), out=x).add_(1.0)
    # Two steps, because 2**k itself may be too large or too small for a float64 where the result is not.
    half = k.to(torch.int64)
    other = torch.bitwise_right_shift(half, 1)
    half.sub_(other)
    for power in (half, other):
        y.mul_(power.add_(1023).bitwise_left_shift_(52).view(torch.float64))
    return y
