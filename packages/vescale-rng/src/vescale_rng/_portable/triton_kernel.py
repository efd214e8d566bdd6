# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, misc"
"""The portable laws as one Triton kernel, with the bits of the torch operations: words, transform and rounding at once.

Multiplications and additions are not fused (`enable_fp_fusion=False`), and the polynomials are those of `elementary`.
Numbers of 64 bits come as two int32 each, because a Python float would become a float32 on the way and the type of
a Python int would depend on its size. Import only where triton is installed.
"""

# No postponed annotations here: triton reads `tl.constexpr` from them.
import contextlib
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import elementary, philox
from .laws import QUARTER, Bernoulli, Integers, Law, Normal, Uniform

__all__ = ["OPTIONS", "launch", "supports"]

OPTIONS = {"enable_fp_fusion": False}
"""Of the compiler: the one that bits depend on."""
_BLOCK = 256
"""Philox blocks per program."""
_MOST = 1 << 30
"""Elements per launch, so that an index within a launch is an int32."""
_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

_M0, _M1 = (tl.constexpr(m) for m in philox.MULTIPLIERS)
_W0, _W1 = (tl.constexpr(w) for w in philox.WEYL)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_LN2_HIGH = tl.constexpr(elementary.LN2_HIGH)
_LN2_LOW = tl.constexpr(elementary.LN2_LOW)
_SQRT_HALF_BITS = tl.constexpr(elementary.SQRT_HALF_BITS)
_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (tl.constexpr(c) for c in elementary.LOG)
_S0, _S1, _S2, _S3, _S4, _S5 = (tl.constexpr(c) for c in elementary.SINE)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(c) for c in elementary.COSINE)
_ROOT_GUESS = tl.constexpr(elementary.ROOT_GUESS)
_QUARTER = tl.constexpr(QUARTER)
_UNIFORM, _NORMAL, _BERNOULLI, _INTEGERS = (tl.constexpr(i) for i in range(4))


@triton.jit
def _pair(low, high):
    """The int64 of two halves."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _number(low, high):
    return _pair(low, high).to(tl.float64, bitcast=True)


@triton.jit
def _like(x, value: tl.constexpr):
    """A float64 constant in the shape of `x`; a bare one might pass through float32."""
    return tl.full(x.shape, value, tl.float64)


@triton.jit
def _philox(index, seed0, seed1, call0, call1):
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    zero = tl.zeros(index.shape, tl.uint32)
    c2 = zero + call0.to(tl.uint32)
    c3 = zero + call1.to(tl.uint32)
    k0 = zero + seed0.to(tl.uint32)
    k1 = zero + seed1.to(tl.uint32)
    m0 = tl.full(index.shape, _M0, tl.uint32)
    m1 = tl.full(index.shape, _M1, tl.uint32)
    w0 = tl.full(index.shape, _W0, tl.uint32)
    w1 = tl.full(index.shape, _W1, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _wide(high, low, BITS: tl.constexpr):
    return (high.to(tl.int64) << (BITS - 32)) | (low.to(tl.int64) >> (64 - BITS))


@triton.jit
def _minus_log(n, EXPONENT: tl.constexpr):
    """`-log((2n + 1) * 2**-EXPONENT)`; the steps of `elementary.minus_log_`."""
    bits = (n * 2 + 1).to(tl.float64).to(tl.int64, bitcast=True)
    power = (bits - _SQRT_HALF_BITS) >> 52
    x = (bits - (power << 52)).to(tl.float64, bitcast=True)
    f = x - _like(x, 1.0)
    e = (power - EXPONENT).to(tl.float64)
    s = f / (f + _like(x, 2.0))
    half_square = (f * f) * _like(x, 0.5)
    z = s * s
    r = z * _like(x, _L6) + _like(x, _L5)
    r = r * z + _like(x, _L4)
    r = r * z + _like(x, _L3)
    r = r * z + _like(x, _L2)
    r = r * z + _like(x, _L1)
    r = r * z + _like(x, _L0)
    r = (r * z + half_square) * s
    r = r + e * _like(x, _LN2_LOW)
    return ((half_square - r) - f) - e * _like(x, _LN2_HIGH)


@triton.jit
def _circle(word, BITS: tl.constexpr):
    """The steps of `laws.circle`; the sign as a bit of an int64."""
    span = tl.full(word.shape, 1, tl.int64) << (BITS - 2)
    sign = ((word >> (BITS - 1)) & 1) << 63
    angle = ((word & (span - 1)) * 2 + (1 - span)).to(tl.float64)
    x = angle * (_like(angle, _QUARTER) / span.to(tl.float64))
    z = x * x
    p = z * _like(x, _S5) + _like(x, _S4)
    p = p * z + _like(x, _S3)
    p = p * z + _like(x, _S2)
    p = p * z + _like(x, _S1)
    p = p * z + _like(x, _S0)
    sine = x + (p * z) * x
    c = z * _like(x, _C7) + _like(x, _C6)
    c = c * z + _like(x, _C5)
    c = c * z + _like(x, _C4)
    c = c * z + _like(x, _C3)
    c = c * z + _like(x, _C2)
    c = c * z + _like(x, _C1)
    cosine = c * z + _like(x, _C0)
    exchange = (word & span) != 0
    return tl.where(exchange, sine, cosine), tl.where(exchange, cosine, sine), sign


@triton.jit
def _sqrt(x):
    """The steps of `elementary.sqrt_`."""
    guess = (x.to(tl.int64, bitcast=True) >> 1) * -1 + _ROOT_GUESS
    y = guess.to(tl.float64, bitcast=True)
    half = x * _like(x, -0.5)
    for _ in tl.static_range(3):
        y = y * ((y * y) * half + _like(x, 1.5))
    root = x * y
    return root + (x - root * root) * (y * _like(x, 0.5))


@triton.jit
def _normals(n, word, EXPONENT: tl.constexpr, BITS: tl.constexpr):
    x, y, sign = _circle(word, BITS)
    log = _minus_log(n, EXPONENT)
    radius = _sqrt(log * _like(log, 2.0))
    radius = (radius.to(tl.int64, bitcast=True) ^ sign).to(tl.float64, bitcast=True)
    return x * radius, y * radius


@triton.jit
def _affine(z, scale, shift):
    return z * scale + shift


@triton.jit
def _round(value, kind: tl.constexpr):
    """To the dtype; to 16 bits by way of float32."""
    if kind == tl.float64:
        return value.to(tl.float64)
    value = value.to(tl.float32)
    if kind == tl.bfloat16:
        # To the nearest, ties to even, in integers: some targets of triton truncate.
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(kind)


@triton.jit
def _uniform(word, start, span, last, BITS: tl.constexpr, kind: tl.constexpr):
    if kind == tl.float64:
        value = word.to(tl.float64) * _like(word, 1.0 / (1 << BITS))
        return tl.minimum(value * span + start, last)
    value = word.to(tl.float32) * (1.0 / (1 << BITS))
    value = value * span.to(tl.float32) + start.to(tl.float32)
    return tl.minimum(_round(value, kind).to(tl.float32), last.to(tl.float32)).to(kind)


@triton.jit
def _flag(chosen, kind: tl.constexpr, FLOATING: tl.constexpr):
    if FLOATING:
        return _round(chosen, kind)
    return chosen.to(kind)


@triton.jit
def _integer(high, low, size, start, kind: tl.constexpr, FLOATING: tl.constexpr, first, last):
    size = size.to(tl.uint64)
    carry = (low.to(tl.uint64) * size) >> 32
    value = ((high.to(tl.uint64) * size + carry) >> 32).to(tl.int64) + start
    if FLOATING:
        number = _round(value, kind).to(tl.float64)
        return _round(tl.minimum(tl.maximum(number, first), last), kind)
    return value.to(kind)


_SCALARS = ["count", "i0", "i1", "s0", "s1", "n0", "n1", "a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"]


@triton.jit(do_not_specialize=_SCALARS)
def _kernel(
    out,  # elements of this launch
    count,  # how many
    i0,  # index of its first block in the call: lower half
    i1,  # upper half, and so on
    s0,  # seed
    s1,
    n0,  # number of the call
    n1,
    a0,  # parameters of the law
    a1,
    b0,
    b1,
    c0,
    c1,
    d0,
    d1,
    LAW: tl.constexpr,
    GRAIN: tl.constexpr,
    FLOATING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kind: tl.constexpr = out.dtype.element_ty
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = _philox(_pair(i0, i1) + spot.to(tl.int64), s0, s1, n0, n1)
    place = spot * GRAIN
    if GRAIN == 4:
        w0 = w0.to(tl.int64)
        w1 = w1.to(tl.int64)
        w2 = w2.to(tl.int64)
        w3 = w3.to(tl.int64)
        if LAW == _UNIFORM:
            start, span, last = _number(a0, a1), _number(b0, b1), _number(c0, c1)
            e0 = _uniform(w0 >> 8, start, span, last, 24, kind)
            e1 = _uniform(w1 >> 8, start, span, last, 24, kind)
            e2 = _uniform(w2 >> 8, start, span, last, 24, kind)
            e3 = _uniform(w3 >> 8, start, span, last, 24, kind)
        elif LAW == _NORMAL:
            std, mean = _number(a0, a1), _number(b0, b1)
            x0, y0 = _normals(w0, w1, 33, 32)
            x1, y1 = _normals(w2, w3, 33, 32)
            e0 = _round(_affine(x0, std, mean), kind)
            e1 = _round(_affine(y0, std, mean), kind)
            e2 = _round(_affine(x1, std, mean), kind)
            e3 = _round(_affine(y1, std, mean), kind)
        else:
            threshold = _pair(a0, a1)
            e0 = _flag(w0 < threshold, kind, FLOATING)
            e1 = _flag(w1 < threshold, kind, FLOATING)
            e2 = _flag(w2 < threshold, kind, FLOATING)
            e3 = _flag(w3 < threshold, kind, FLOATING)
        tl.store(out + place, e0, mask=place < count)
        tl.store(out + place + 1, e1, mask=place + 1 < count)
        tl.store(out + place + 2, e2, mask=place + 2 < count)
        tl.store(out + place + 3, e3, mask=place + 3 < count)
    else:
        if LAW == _UNIFORM:
            start, span, last = _number(a0, a1), _number(b0, b1), _number(c0, c1)
            e0 = _uniform(_wide(w0, w1, 53), start, span, last, 53, kind)
            e1 = _uniform(_wide(w2, w3, 53), start, span, last, 53, kind)
        elif LAW == _NORMAL:
            x0, y0 = _normals(_wide(w0, w1, 52), _wide(w2, w3, 54), 53, 54)
            e0 = _round(_affine(x0, _number(a0, a1), _number(b0, b1)), kind)
            e1 = _round(_affine(y0, _number(a0, a1), _number(b0, b1)), kind)
        elif LAW == _BERNOULLI:
            e0 = _flag(_wide(w0, w1, 53) < _pair(a0, a1), kind, FLOATING)
            e1 = _flag(_wide(w2, w3, 53) < _pair(a0, a1), kind, FLOATING)
        else:
            size, start, first, last = _pair(a0, a1), _pair(b0, b1), _number(c0, c1), _number(d0, d1)
            e0 = _integer(w0, w1, size, start, kind, FLOATING, first, last)
            e1 = _integer(w2, w3, size, start, kind, FLOATING, first, last)
        tl.store(out + place, e0, mask=place < count)
        tl.store(out + place + 1, e1, mask=place + 1 < count)


def supports(law: Law) -> bool:
    """Tell whether the kernel can draw a law."""
    if law.dtype not in _TYPES:
        return False
    if isinstance(law, Integers):
        return law.range <= 1 << 32
    if isinstance(law, Bernoulli):
        return not law.each
    return type(law) in (Uniform, Normal)


def launch(law: Law, out: Tensor, start: int, seed: int, call: int) -> None:
    """Write the elements `[start, start + len(out))` of a call.

    Args:
        law: one that `supports` agrees to.
        out: contiguous, 1-D, of the law's dtype, on a device of triton's.
        start: a multiple of the law's grain.
        seed: key, 0 <= seed < 2**64.
        call: number of the operator call, 0 <= call < 2**64.
    """
    kind, numbers = _parameters(law)
    if out.dtype == torch.bool:
        out = out.view(torch.uint8)
    # Triton launches on the current device, which need not be that of the tensor.
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        for done in range(0, len(out), _MOST):
            piece = out[done : done + _MOST]
            halves = [h for n in ((start + done) // law.grain, seed, call, *numbers) for h in _halves(n)]
            grid = (triton.cdiv(len(piece), _BLOCK * law.grain),)
            _kernel[grid](
                piece,
                len(piece),
                *halves,
                LAW=kind,
                GRAIN=law.grain,
                FLOATING=out.dtype.is_floating_point,
                BLOCK=_BLOCK,
                **OPTIONS,
            )


def _parameters(law: Law) -> tuple[int, tuple[int, int, int, int]]:
    """Which law it is, and its numbers as 64 bits each."""
    if isinstance(law, Uniform):
        return _UNIFORM.value, (_bits(law.start), _bits(law.span), _bits(law.last), 0)
    if isinstance(law, Normal):
        return _NORMAL.value, (_bits(law.std), _bits(law.mean), 0, 0)
    if isinstance(law, Bernoulli):
        return _BERNOULLI.value, (law.threshold, 0, 0, 0)
    if isinstance(law, Integers):
        return _INTEGERS.value, (law.range, law.low, _bits(law.first), _bits(law.last))
    raise TypeError(f"no kernel for {type(law).__name__}; ask supports() first")


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<d", x), "little")


def _halves(n: int) -> tuple[int, int]:
    """The two halves of a 64-bit number, each as the int32 of its bits."""
    n &= (1 << 64) - 1
    low, high = n & 0xFFFFFFFF, n >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)
