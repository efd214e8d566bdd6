"""`randperm` and `multinomial`: what they pick, how often, and by which rule."""

from __future__ import annotations

import math

import pytest
import torch

from vescale_rng import PortableGenerator
from vescale_rng._portable.philox import philox_blocks
from vescale_rng.errors import RandomError

N = 100_000


def numbers(seed: int, call: int, count: int) -> list[int]:
    """The call's 64-bit numbers, as Python integers."""
    even, odd = philox_blocks(seed, call, 0, count, torch.device("cpu"))
    pairs = torch.stack((even[0], odd[0], even[1], odd[1]), 1).view(-1, 2).tolist()
    return [high << 32 | low for high, low in pairs[:count]]


def frequencies(picked: torch.Tensor, categories: int) -> torch.Tensor:
    return torch.bincount(picked.flatten(), minlength=categories).double() / picked.numel()


def chi_square(picked: torch.Tensor, p: torch.Tensor) -> float:
    expected = p.double() / p.double().sum() * picked.numel()
    counts = torch.bincount(picked, minlength=len(p)).double()
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


def test_randperm_sorts_the_numbers():
    g = PortableGenerator(9, counter=2)
    found = g.whole("randperm", (1001,), {})
    keys = [n - (1 << 64) if n >> 63 else n for n in numbers(9, 2, 1001)]
    assert found.tolist() == sorted(range(1001), key=keys.__getitem__)
    assert g.counter == 3


@pytest.mark.parametrize("n", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_randperm_of_few(n, dtype):
    found = PortableGenerator(1).whole("randperm", (n,), {"dtype": dtype, "device": "cpu"})
    assert found.dtype == dtype
    assert sorted(found.tolist()) == list(range(n))


def test_randperm_has_all_orders():
    g = PortableGenerator(3)
    seen = [tuple(g.whole("randperm", (3,), {}).tolist()) for _ in range(1200)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((c - 200) ** 2 / 200 for c in counts) < 20.5  # 5 degrees of freedom, 1 in 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_with_replacement(dtype):
    p = torch.tensor([0.0, 1, 2, 3, 4, 0, 0.5], dtype=dtype)
    picked = PortableGenerator(5).whole("multinomial", (p, N, True), {})
    assert chi_square(picked, p) < 18.5  # 4 degrees of freedom, 1 in 1000


def test_with_replacement_by_number():
    p = torch.tensor([1.0, 2.0, 1.0])
    picked = PortableGenerator(5).whole("multinomial", (p, 50, True), {})
    expected = [0 if n < 1 << 62 else 2 if n >= 3 << 62 else 1 for n in numbers(5, 0, 50)]
    assert picked.tolist() == expected


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 2.0**-140])
def test_rows_of_any_scale(scale):
    p = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 2.0]]) * scale
    picked = PortableGenerator(6).whole("multinomial", (p, N, True), {})
    assert picked.shape == (2, N)
    for row, chances in zip(picked, p, strict=True):
        assert chi_square(row, chances) < 10.9  # 1 degree of freedom, 1 in 1000
    assert frequencies(picked[0], 3)[0].item() == pytest.approx(0.25, abs=0.01)


def test_without_replacement_one_sample():
    p = torch.tensor([4.0, 0.0, 3.0, 2.0, 1.0])
    picked = PortableGenerator(7).whole("multinomial", (p.expand(20_000, 5), 1), {})
    assert chi_square(picked.flatten(), p) < 16.3  # 3 degrees of freedom, 1 in 1000


def test_without_replacement_two_samples():
    p = torch.tensor([0.5, 0.3, 0.2])
    rows = 20_000
    picked = PortableGenerator(8).whole("multinomial", (p.expand(rows, 3), 2), {})
    assert (picked[:, 0] != picked[:, 1]).all()
    first = frequencies(picked[:, 0], 3)
    torch.testing.assert_close(first, p.double(), atol=4 * math.sqrt(0.25 / rows), rtol=0)
    # the second, after the first was taken out
    after_0 = frequencies(picked[picked[:, 0] == 0, 1], 3)
    torch.testing.assert_close(after_0, torch.tensor([0, 0.6, 0.4]).double(), atol=4 * math.sqrt(0.25 / 9000), rtol=0)


def test_all_categories_without_replacement():
    picked = PortableGenerator(1).whole("multinomial", (torch.ones(4, 6), 6), {})
    assert (picked.sort(1).values == torch.arange(6)).all()


@pytest.mark.parametrize(
    ("p", "num_samples", "replacement"),
    [
        (torch.ones(3), 0, True),
        (torch.ones(2, 2, 2), 1, True),
        (torch.ones(0), 1, True),
        (torch.tensor([1.0, -1.0]), 1, True),
        (torch.tensor([1.0, math.nan]), 1, True),
        (torch.tensor([1.0, math.inf]), 1, False),
        (torch.tensor([[1.0], [0.0]]), 1, True),
        (torch.tensor([1.0, 0.0, 1.0]), 3, False),
    ],
)
def test_wrong_arguments(p, num_samples, replacement):
    g = PortableGenerator(0)
    with pytest.raises(RandomError, match="multinomial"):
        g.whole("multinomial", (p, num_samples, replacement), {})
    assert g.counter == 0
