"""From Philox words to numbers: one law per distribution, with the same bits on every machine and device.

A law is made for one call, with the arguments checked and every constant worked out on the host; `produce` then turns
whole blocks into elements. Integers become floating point where that is exact, the mathematics is float64 with the
functions of `elementary`, and the last step rounds to the dtype. 32-bit laws take one word per element (4 elements per
block), 64-bit laws two (2 per block).
"""

from __future__ import annotations

import abc
import decimal
import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._streams.modes import plain_torch
from ..errors import RandomError, UnsupportedRandomOperatorError
from .elementary import exp_, minus_log_, sincos_, sqrt_
from .integers import random_range, scale_to_range

__all__ = ["Bernoulli", "Integers", "Law", "Normal", "Uniform", "make_law"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIGN = -(1 << 63)
"""The sign bit of a float64 seen as an int64."""
QUARTER = math.pi / 4


class Law(abc.ABC):
    """A distribution with its arguments and dtype."""

    name: ClassVar[str]
    defaults: ClassVar[tuple[Any, ...]] = ()
    required: ClassVar[int] = 0
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = _FLOATS
    grain: int
    """Elements per block: 4 with a word each, or 2 with two words each."""

    def __init__(self, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
        if self.dtypes is not None and dtype not in self.dtypes:
            raise UnsupportedRandomOperatorError(
                f"{self.name} of {dtype} has no portable form; dtypes: {', '.join(map(str, self.dtypes))}"
            )
        if not self.required <= len(args) <= len(self.defaults):
            raise TypeError(f"{self.name} takes {len(self.defaults)} arguments at most, got {args!r}")
        self.dtype = dtype
        self.grain = 2 if dtype == torch.float64 else 4
        self.prepare(
            *(d if a is None else a for a, d in zip(args, self.defaults, strict=False)), *self.defaults[len(args) :]
        )

    @abc.abstractmethod
    def prepare(self, *args: Any) -> None:
        """Check the arguments and work out constants."""

    @abc.abstractmethod
    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        """Turn blocks into elements.

        Args:
            even: (2, n) int64, words 0 and 2; may be overwritten.
            odd: (2, n) int64, words 1 and 3; may be overwritten.
            out: n * grain elements, contiguous.
            params: the arguments; tensors among them have the length of `out`.
        """

    def check(self, good: bool, rule: str, *args: Any) -> None:
        """Raise for arguments outside of the distribution's domain."""
        if not good:
            raise RandomError(f"{self.name} expects {rule}, got {', '.join(map(repr, args))}")


# -- from words to the random part ----------------------------------------------------------------------------------


def lanes(out: Tensor, grain: int) -> tuple[Tensor, ...]:
    """Views of shape (2, n): where elements that come from words 0 and 2 go and, of four, those from words 1 and 3."""
    if grain == 2:
        return (out.view(-1, 2).t(),)
    pairs = out.view(-1, 2, 2)
    return pairs[:, :, 0].t(), pairs[:, :, 1].t()


def put(place: Tensor, value: Tensor) -> None:
    """Copy, row by row: torch would make the inner loop run over the two rows, because they are closer in memory."""
    for row, source in zip(place.unbind(), value.unbind(), strict=True):
        row.copy_(source)


def wide(even: Tensor, odd: Tensor, bits: int) -> Tensor:
    """Return the upper `bits` (at most 63) of the 64-bit numbers with upper half `even`; overwrites both."""
    return even.bitwise_left_shift_(bits - 32).bitwise_or_(odd.bitwise_right_shift_(64 - bits))


def fractions(even: Tensor, odd: Tensor, grain: int) -> tuple[tuple[Tensor, ...], int]:
    """Return odd integers as float64, and the exponent that scales them to the open interval from 0 to 1."""
    if grain == 2:
        return (_odd_number(wide(even, odd, 52)),), 53
    return (_odd_number(even), _odd_number(odd)), 33


def _odd_number(words: Tensor) -> Tensor:
    return words.mul_(2).add_(1).to(torch.float64)


def circle(words: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """A random point on the circle from integers of `bits` bits: `(x, y)` and a sign bit for both.

    The lower bits are an angle between -pi/4 and pi/4, the next one exchanges the coordinates, the top one is the sign:
    a quarter arc covers the circle this way, without reduction of angles. (Reflected quarters are as uniform as turned
    ones.)
    """
    sign = torch.bitwise_left_shift(words, 64 - bits).bitwise_and_(SIGN)
    span = 1 << (bits - 2)
    exchange = torch.bitwise_left_shift(words, 65 - bits).bitwise_right_shift_(63)
    angle = words.bitwise_and_(span - 1).mul_(2).add_(1 - span).to(torch.float64).mul_(QUARTER / span)
    sine, cosine = sincos_(angle)
    # All bits of `exchange` are alike: the exclusive or with the difference of both exchanges them or does nothing.
    x, y = cosine.view(torch.int64), sine.view(torch.int64)
    exchange.bitwise_and_(torch.bitwise_xor(x, y))
    x.bitwise_xor_(exchange)
    y.bitwise_xor_(exchange)
    return cosine, sine, sign


def normals(even: Tensor, odd: Tensor, grain: int) -> tuple[Tensor, ...]:
    """Standard normal numbers (Box and Muller), float64 in the shape of `lanes`."""
    if grain == 4:
        x, y, sign = circle(odd, 32)
        radius = minus_log_(_odd_number(even), 33)
    else:
        both = wide(even, odd, 54)
        x, y, sign = circle(both[1], 54)
        # Radius: 52 bits of words 0 and 1; the shift drops the two bits that only the angle needs.
        radius = minus_log_(_odd_number(both[0].bitwise_right_shift_(2)), 53)
    sqrt_(radius.mul_(2.0))
    radius.view(torch.int64).bitwise_xor_(sign)
    x.mul_(radius)
    y.mul_(radius)
    return (x, y) if grain == 4 else (torch.stack((x, y)),)


def store(values: tuple[Tensor, ...], out: Tensor, grain: int) -> None:
    """Round float64 numbers to the dtype of `out`; 16-bit types by way of float32, as every device does."""
    for value, place in zip(values, lanes(out, grain), strict=True):
        put(place, value if out.dtype in (torch.float32, torch.float64) else value.to(torch.float32))


def affine_(values: tuple[Tensor, ...], scale: float, shift: float) -> tuple[Tensor, ...]:
    """Multiply and add in place; leaves out what does not change a bit."""
    for value in values:
        if scale != 1.0:
            value.mul_(scale)
        if shift != 0.0:
            value.add_(shift)
    return values


# -- the laws ---------------------------------------------------------------------------------------------------------


class Uniform(Law):
    """`from <= x < to`: 24 random bits, 53 for float64; a result that rounds to `to` becomes the number before it."""

    name = "uniform_"
    defaults = (0.0, 1.0)

    def prepare(self, start: Any, end: Any) -> None:
        limit = torch.finfo(self.dtype).max
        start, end = float(start), float(end)
        self.check(start <= end and end - start <= limit, f"from <= to and to - from <= {limit}", start, end)
        self.check(-limit <= start and end <= limit, f"from and to within {self.dtype}", start, end)
        # In the dtype, as torch does; then in the type of the arithmetic.
        ends = torch.tensor([start, end], dtype=self.dtype)
        self.compute = torch.float64 if self.dtype == torch.float64 else torch.float32
        start, end = ends.to(self.compute).tolist()
        self.start = start
        self.span = torch.tensor(end, dtype=self.compute).sub_(torch.tensor(start, dtype=self.compute)).item()
        self.last = last_below(end, self.dtype) if end > start else start

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        if self.grain == 2:
            values, bits = [wide(even, odd, 53)], 53
        else:
            values, bits = [even.bitwise_right_shift_(8), odd.bitwise_right_shift_(8)], 24
        number = out if out.dtype == self.compute else torch.empty_like(out, dtype=self.compute)
        for place, value in zip(lanes(number, self.grain), values, strict=True):
            put(place, value)
        number.mul_(2.0**-bits)
        if self.span != 1.0:
            number.mul_(self.span)
        if self.start != 0.0:
            number.add_(self.start)
        if number is not out:
            out.copy_(number)
        out.clamp_(max=self.last)


class Normal(Law):
    """Box and Muller: a pair of elements from 32 bits each of radius and angle, float64 from 52 and 54."""

    name = "normal_"
    defaults = (0.0, 1.0)

    def prepare(self, mean: Any, std: Any) -> None:
        self.mean, self.std = float(mean), float(std)
        self.check(self.std >= 0.0, "std >= 0", std)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        store(affine_(normals(even, odd, self.grain), self.std, self.mean), out, self.grain)


class LogNormal(Normal):
    """The exponential of a normal number, rounded once."""

    name = "log_normal_"
    defaults = (1.0, 2.0)

    def prepare(self, mean: Any, std: Any) -> None:
        super().prepare(mean, std)
        self.check(self.std > 0.0, "std > 0", std)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        values = affine_(normals(even, odd, self.grain), self.std, self.mean)
        store(tuple(exp_(value) for value in values), out, self.grain)


class Exponential(Law):
    """`-log(u) / lambda`, at least the smallest positive number of the dtype unless lambda is infinite."""

    name = "exponential_"
    defaults = (1.0,)

    def prepare(self, rate: Any) -> None:
        rate = float(rate)
        self.check(rate > 0.0, "lambda > 0", rate)
        self.scale = 1.0 / rate
        info = torch.finfo(self.dtype)
        self.least = info.smallest_normal * info.eps if self.scale > 0.0 else 0.0

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        numbers, exponent = fractions(even, odd, self.grain)
        store(affine_(tuple(minus_log_(x, exponent) for x in numbers), self.scale, 0.0), out, self.grain)
        out.clamp_(min=self.least)


class Cauchy(Law):
    """`median + sigma * tan(angle)`, the slope of a random point on the circle."""

    name = "cauchy_"
    defaults = (0.0, 1.0)

    def prepare(self, median: Any, sigma: Any) -> None:
        self.median, self.sigma = float(median), float(sigma)
        self.check(self.sigma > 0.0, "sigma > 0", sigma)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        words = (wide(even, odd, 54),) if self.grain == 2 else (even, odd)
        values = []
        for word in words:
            x, y, _ = circle(word, 54 if self.grain == 2 else 32)
            values.append(y.div_(x))
        store(affine_(tuple(values), self.sigma, self.median), out, self.grain)


class Geometric(Law):
    """`ceil(log(u) / log(1 - p))` with 52 random bits, at most the largest number of the dtype."""

    name = "geometric_"
    required = 1
    defaults = (None,)
    dtypes = (*_FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

    def prepare(self, p: Any) -> None:
        p = float(p)
        self.check(0.0 < p < 1.0, "0 < p < 1", p)
        self.grain = 2
        # decimal rounds correctly everywhere; the machine's log1p need not.
        context = decimal.Context(prec=60)
        complement = context.subtract(decimal.Decimal(1), decimal.Decimal(p))
        log = context.ln(complement) if complement != 1 else -decimal.Decimal(p)
        self.scale = float(context.divide(decimal.Decimal(-1), log))
        if self.dtype.is_floating_point:
            self.most = torch.finfo(self.dtype).max
        else:
            # The largest float64 that the conversion to an integer can take.
            self.most = last_below(float(torch.iinfo(self.dtype).max + 1), torch.float64)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        numbers, exponent = fractions(even, odd, 2)
        value = minus_log_(numbers[0], exponent).mul_(self.scale).ceil_().clamp_(1.0, self.most)
        if self.dtype.is_floating_point:
            store((value,), out, 2)
        else:
            put(lanes(out, 2)[0], value.to(torch.int64))


class Bernoulli(Law):
    """`u < p`: 53 random bits, or 32 for a number `p` that neither it nor `1 - p` is below 2**-16."""

    name = "bernoulli_"
    defaults = (0.5,)
    dtypes = None

    def prepare(self, p: Any) -> None:
        self.each = isinstance(p, Tensor) and p.dim() > 0
        self.grain = 2
        if self.each:
            return
        p = float(p)
        self.check(0.0 <= p <= 1.0, "0 <= p <= 1", p)
        if 2.0**-16 <= p <= 1 - 2.0**-16 or p in (0.0, 1.0):
            self.grain = 4
            self.threshold = round(p * 2.0**32)  # exact product; ties to even
        else:
            self.threshold = math.ceil(p * 2.0**53)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        if self.grain == 4:
            for place, word in zip(lanes(out, 4), (even, odd), strict=True):
                put(place, word < self.threshold)
            return
        (place,) = lanes(out, 2)
        word = wide(even, odd, 53)
        if not self.each:
            put(place, word < self.threshold)
            return
        (p,) = params
        if not bool(((p >= 0) & (p <= 1)).all()):
            raise RandomError(f"{self.name} expects all elements of p to be between 0 and 1")
        (chance,) = lanes(p, 2)
        put(place, word.to(torch.float64).mul_(2.0**-53) < chance.to(torch.float64))


class Integers(Law):
    """`random_`: the upper half of (64 random bits x range), so a value's chance is off by range / 2**64 at most."""

    name = "random_"
    defaults = (None, None)
    dtypes = (*Geometric.dtypes, torch.bool)

    def __init__(self, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
        super().__init__(dtype, (0, *args) if len(args) == 1 else args)  # random_(to)

    def prepare(self, start: Any, end: Any) -> None:
        self.grain = 2
        self.low, self.range, self.first, self.last = random_range(self.dtype, start, end)

    def produce(self, even: Tensor, odd: Tensor, out: Tensor, params: tuple[Any, ...]) -> None:
        value = scale_to_range(even, odd, self.range).add_(self.low)
        (place,) = lanes(out, 2)
        if self.dtype in (torch.float16, torch.bfloat16):
            value = value.to(torch.float32)
        put(place, value)
        if self.dtype.is_floating_point:
            out.clamp_(self.first, self.last)


def last_below(limit: float, dtype: torch.dtype) -> float:
    """Return the largest number of a floating dtype that is below `limit`.

    >>> last_below(1.0, torch.float16)
    0.99951171875
    """
    t = torch.tensor(limit, dtype=dtype)
    below = torch.nextafter(t, torch.tensor(-math.inf, dtype=dtype))
    return float(t) if float(t) < limit else float(below)


_LAWS: dict[str, type[Law]] = {
    law.name: law for law in (Uniform, Normal, LogNormal, Exponential, Cauchy, Geometric, Bernoulli, Integers)
}


def make_law(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> Law:
    """Return the law of an operator.

    Raises:
        UnsupportedRandomOperatorError: if the operator, or its form for this dtype, has none.
        RandomError: for arguments outside of the distribution's domain.

    >>> make_law("uniform_", torch.float32, ()).grain, make_law("uniform_", torch.float64, ()).grain
    (4, 2)
    """
    if any(isinstance(a, Tensor) for a in args):
        return _make_law(op, dtype, args)
    return _cached_law(op, dtype, args)


def _make_law(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> Law:
    if op == "dropout":
        (p,) = args
        op, args = "bernoulli_", (1 - p,)
    law = _LAWS.get(op)
    if law is None:
        raise UnsupportedRandomOperatorError(
            f"{op} has no portable form; portable operators: {', '.join(sorted(_LAWS))}, multinomial, randperm"
        )
    with plain_torch():
        return law(dtype, args)


_cached_law = functools.lru_cache(maxsize=256)(_make_law)
