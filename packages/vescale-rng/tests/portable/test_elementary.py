"""The elementary functions against numpy's in extended precision, in units of the last place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vescale_rng._portable.elementary import exp_, horner, minus_log_, sincos_, sqrt_

extended = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="no type wider than float64 to compare with")


def numbers(low: float, high: float, count: int = 200_000) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * (high - low) + low


def ulps(found: torch.Tensor, exact: np.ndarray) -> float:
    spacing = np.spacing(np.abs(exact.astype(np.float64)))
    return float((np.abs(found.numpy().astype(np.longdouble) - exact) / spacing).max())


def wide(x: torch.Tensor) -> np.ndarray:
    return x.numpy().astype(np.longdouble)


@extended
@pytest.mark.parametrize(("low", "high"), [(2.0**-60, 1.0), (1 - 2.0**-20, 1.0), (0.7, 0.71), (1.0, 2.0**60)])
def test_logarithm(low, high):
    x = numbers(low, high)
    x = x[x != 1]
    assert ulps(minus_log_(x.clone(), 0), -np.log(wide(x))) < 1


@extended
def test_logarithm_of_scaled_integers():
    n = torch.arange(1, 2**16, 2, dtype=torch.float64)
    near_one = 2.0**33 - n
    for x in (n, near_one):
        assert ulps(minus_log_(x.clone(), 33), -np.log(wide(x) * np.longdouble(2.0) ** -33)) < 1


@extended
def test_sine_and_cosine():
    x = numbers(-math.pi / 4, math.pi / 4)
    for angle in (x, x * 2.0**-20, x * 2.0**-52):
        sine, cosine = sincos_(angle.clone())
        assert ulps(sine, np.sin(wide(angle))) < 1
        assert ulps(cosine, np.cos(wide(angle))) < 1.5


@extended
@pytest.mark.parametrize(("low", "high"), [(0.0, 100.0), (1.0, 4.0), (2.0**-53, 2.0**-50)])
def test_square_root(low, high):
    x = numbers(low, high) + 1e-300
    assert ulps(sqrt_(x.clone()), np.sqrt(wide(x))) < 1


@extended
def test_exponential():
    x = numbers(-708.0, 709.0)
    for argument in (x, x / 1000):
        assert ulps(exp_(argument.clone()), np.exp(wide(argument))) < 1


def test_exponential_at_the_ends():
    x = torch.tensor([709.7, 709.8, 1e300, math.inf, -708.5, -745.0, -746.0, -1e300, -math.inf], dtype=torch.float64)
    torch.testing.assert_close(exp_(x.clone()), x.exp(), rtol=1e-15, atol=2.0**-1074)
    assert exp_(x.clone())[[1, 2, 3]].isinf().all()
    assert (exp_(x.clone())[6:] == 0).all()


def test_horner_has_the_lowest_power_first():
    assert horner(torch.tensor([2.0]), (1.0, 10.0, 100.0)).item() == 421.0
