"""Codes of numbers against what their docs promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_comm._compress.codecs import Bfloat16, Float16, Int8

CODECS: list[Any] = [Bfloat16(), Float16(8), Int8(8)]


def told(codec: Any, rows: Tensor) -> Tensor:
    code = codec.encode(rows)
    assert code.dtype == torch.uint8
    assert code.is_contiguous()
    assert len(code) == len(rows)
    return codec.decode(code, rows.shape[1], rows.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(-120, 120), st.integers(0, 99))
def test_errors_stay_within_bounds_at_any_magnitude(codec: Any, rows: int, numel: int, power: int, seed: int) -> None:
    x = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    y = told(codec, x)
    assert y.shape == x.shape
    error = (y.double() - x.double()).abs()
    if isinstance(codec, Int8):
        for start in range(0, numel, 8):
            block = slice(start, start + 8)
            largest = x[:, block].abs().amax(1, keepdim=True).double()
            assert bool((error[:, block] <= largest / 254 * 1.001 + 2.0**-148).all())
    elif isinstance(codec, Bfloat16):
        assert bool((error <= x.abs().double() / 256 + 2.0**-133).all())
    elif power > -100:
        # Eleven bits, of numbers down to a 2**29th of the largest of the block.
        assert bool((error <= x.abs().double() / 2048 + x.abs().max().double() * 2.0**-39).all())


def test_int8_is_exact_on_its_own_grid() -> None:
    grid = torch.arange(-127, 128).float().view(1, -1) * 0.5
    assert torch.equal(told(Int8(255), grid), grid)
    assert torch.equal(told(Int8(4), torch.zeros(2, 6)), torch.zeros(2, 6))


def test_bytes_are_those_of_payload_and_factors() -> None:
    x = torch.ones(2, 20)
    assert Bfloat16().encode(x).shape == (2, 40)
    assert Float16(8).encode(x).shape == (2, 3 * 8 * 2 + 3 * 4)
    assert Int8(8).encode(x).shape == (2, 3 * 8 + 3 * 4)
    # A block is no longer than a row.
    assert Int8(256).encode(x).shape == (2, 20 + 4)


def test_float16_neither_overflows_nor_vanishes() -> None:
    """pytorch#57410: gradients of fp16 hooks overflowed."""
    for size in (3e38, 70000.0, 1e-9, 1e-30):
        x = torch.tensor([[size, -size / 3]])
        assert torch.allclose(told(Float16(8), x), x, rtol=1e-3, atol=0), size


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_a_number(bad: float) -> None:
    x = torch.ones(1, 24)
    x[0, 3] = bad
    for codec in CODECS:
        y = told(codec, x)
        assert not y[0, 3].isfinite()
        assert bool((y[0, 8:] == 1).all())
    assert told(Float16(8), x)[0, 3].item() == pytest.approx(bad, nan_ok=True)
    assert bool((told(Float16(8), x)[0, :3] == 1).all())
    # A number that no factor can tell is not told quietly either.
    assert not told(Int8(8), torch.full((1, 2), 1e300, dtype=torch.float64)).isfinite().any()


def test_wrong_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="block: needs a number of elements of at least 1; got 0"):
        Int8(0)
