"""Ranges of `random_` against torch's own, and products against Python integers."""

from __future__ import annotations

import random

import pytest
import torch

from vescale_rng._portable.integers import multiply_high, random_range, scale_to_range
from vescale_rng.errors import RandomError

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def halves(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([n >> 32 for n in numbers]), torch.tensor([n & 0xFFFFFFFF for n in numbers])


SIZES = [
    1,
    2,
    3,
    7,
    1000,
    2**31 - 1,
    2**31,
    2**31 + 1,
    2**32 - 1,
    2**32,
    2**32 + 1,
    10**15 + 7,
    2**63,
    2**64 - 1,
    2**64,
]


@pytest.mark.parametrize("size", SIZES)
def test_scaling_is_the_upper_half_of_the_product(size):
    dice = random.Random(size)
    numbers = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *(dice.getrandbits(64) for _ in range(500))]
    found = scale_to_range(*halves(numbers), size)
    assert [n & (2**64 - 1) for n in found.tolist()] == [n * size >> 64 for n in numbers]


def test_product_of_tensors():
    dice = random.Random(0)
    left, right = ([dice.getrandbits(64) for _ in range(1000)] for _ in range(2))
    found = multiply_high(*halves(left), *halves(right))
    assert [n & (2**64 - 1) for n in found.tolist()] == [a * b >> 64 for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ranges_of_integers(dtype):
    info = torch.iinfo(dtype)
    assert random_range(dtype, None, None)[:2] == (0, info.max + 1)
    assert random_range(dtype, info.min, None)[:2] == (info.min, info.max - info.min + 1)
    assert random_range(dtype, 3, 10)[:2] == (3, 7)


@pytest.mark.parametrize(("dtype", "digits"), list(zip(FLOATS, [11, 8, 24, 53], strict=True)))
def test_ranges_of_floats(dtype, digits):
    assert random_range(dtype, None, None)[:2] == (0, 2**digits + 1)
    assert random_range(dtype, 0, 10) == (0, 10, 0.0, 9.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_stays_within_the_range(dtype):
    digits = random_range(dtype, None, None)[1].bit_length() - 1
    low, high = 2**digits + 1, 2 ** (digits + 1) + 3
    _, _, first, last = random_range(dtype, low, high)
    assert low <= first < last <= high - 1
    inf = torch.tensor(float("inf"), dtype=dtype)
    assert torch.nextafter(torch.tensor(first, dtype=dtype), -inf).item() < low
    assert torch.nextafter(torch.tensor(last, dtype=dtype), inf).item() > high - 1


@pytest.mark.parametrize(
    ("dtype", "start", "end"),
    [(torch.int8, 5, 5), (torch.int8, 7, 5), (torch.int8, 0, 129), (torch.uint8, -1, 3), (torch.bool, 0, 3)],
)
def test_wrong_ranges(dtype, start, end):
    with pytest.raises(RandomError, match="random_ expects"):
        random_range(dtype, start, end)
