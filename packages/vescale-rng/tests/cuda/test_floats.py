"""Roundings: every step against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vescale_rng._cuda.floats import fma, round_to, uniform32, uniform64

SMALL = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)
WIDE = st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-6)
UNIT32 = st.integers(1, 2**24).map(lambda i: i / 2**24)
WORD = st.integers(0, 2**32 - 1)


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Round a fraction to a type, ties to even, by its neighbours."""
    if dtype == torch.float64:
        return float(exact)
    if exact == 0:
        return 0.0
    exponent = math.frexp(float(abs(exact)))[1]
    step = Fraction(2) ** (exponent - 24)
    if abs(exact) / step >= 2**24:
        step *= 2
    return float(round(exact / step) * step)


@given(UNIT32, SMALL, SMALL)
@example((2**24 - 1) / 2**24, 2.0, 1.0 + 2**-23)
def test_fma_of_float32(a: float, b: float, c: float) -> None:
    got = float(fma(torch.tensor([a], dtype=torch.float32), b, c))
    assert got == nearest(Fraction(a) * Fraction(b) + Fraction(c), torch.float32)


def test_fma_of_float32_where_two_roundings_differ() -> None:
    # The exact sum lies just below the middle of two float32; float64 rounds it onto the middle, which goes up.
    a, b, c = 1 + 2**-23, 2**-24 * (1 - 2**-23), 1 + 2**-23
    twice = torch.tensor(a * b + c, dtype=torch.float64).float()
    assert float(twice) == 1 + 2**-22
    assert float(fma(torch.tensor([a], dtype=torch.float32), b, c)) == 1 + 2**-23


@given(WIDE, WIDE, WIDE)
def test_fma_of_float64(a: float, b: float, c: float) -> None:
    got = float(fma(torch.tensor([a], dtype=torch.float64), b, c))
    assert got == float(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_of_float64_differs_from_two_roundings() -> None:
    a = torch.linspace(0.1, 1, 1000, dtype=torch.float64)
    exact = [float(Fraction(x) * Fraction(1.1) + Fraction(0.3)) for x in a.tolist()]
    assert fma(a, 1.1, 0.3).tolist() == exact
    assert (a * 1.1 + 0.3).tolist() != exact


def test_fma_turns_minus_zero_into_zero() -> None:
    assert math.copysign(1.0, float(fma(torch.tensor([-0.0]), 1.0, 0.0))) == 1.0


@given(WORD)
@example(0)
@example(2**32 - 1)
@example(2**24 + 1)
@example(2**31 + 2**7)
def test_uniform32(word: int) -> None:
    rounded = nearest(Fraction(word), torch.float32)
    exact = Fraction(rounded) / 2**32 + Fraction(1, 2**33)
    assert float(uniform32(torch.tensor([word]))) == nearest(exact, torch.float32)


@given(WORD, WORD)
@example(2**32 - 1, 2**32 - 1)
def test_uniform64(low: int, high: int) -> None:
    exact = Fraction(low ^ (high << 21), 2**53) + Fraction(1, 2**54)
    assert float(uniform64(torch.tensor([low]), torch.tensor([high]))) == float(exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_round_to(dtype: torch.dtype) -> None:
    assert round_to(0.1, dtype) == torch.tensor(0.1, dtype=dtype).item()
