"""How far two tensors are apart, beside what torch says about the whole tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._geometry import Box
from vescale_ckpt._ops.compare import Distance, blocks_of, distance


def of(a: torch.Tensor, b: torch.Tensor, most: int = 7) -> Distance:
    whole = Box.whole(tuple(a.shape))
    return distance(lambda box: a[box.slices(whole)], lambda box: b[box.slices(whole)], tuple(a.shape), most)


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_blocks_cover_every_element_once_in_order(shape: tuple[int, ...], most: int) -> None:
    whole = Box.whole(shape)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    blocks = list(blocks_of(whole, most))
    assert all(block.numel <= most for block in blocks)
    found = torch.cat([numbers[block.slices(whole)].reshape(-1) for block in blocks])
    assert torch.equal(found, numbers.reshape(-1))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64,
     torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool],
)  # fmt: skip
def test_against_whole_tensors(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 5), generator=generator)
    b = a.clone()
    b[1, 2], b[4, 4] = 1 - min(1, int(a[1, 2])), 0
    gaps = (a.to(dtype).to(torch.complex128) - b.to(dtype).to(torch.complex128)).abs()
    found = of(a.to(dtype), b.to(dtype))
    assert found.elements == 30
    assert found.different == int((gaps > 0).sum())
    assert found.max_abs == float(gaps.max())
    assert found.mean_abs == pytest.approx(float(gaps.mean()))


def test_bits_count_not_only_values() -> None:
    minus = of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (minus.different, minus.max_abs) == (1, 0.0)
    nan = torch.tensor([math.nan, math.inf])
    assert of(nan, nan.clone()).different == 0
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    both = of(payloads[:1], payloads[1:])
    assert (both.different, both.max_abs) == (1, 0.0)
    one_sided = of(nan, torch.tensor([1.0, math.inf]))
    assert one_sided.different == 1
    assert math.isnan(one_sided.max_abs)
    assert of(torch.tensor([math.inf]), torch.tensor([-math.inf])).max_abs == math.inf


def test_nan_is_not_forgotten_when_larger_numbers_follow() -> None:
    a, b = torch.zeros(20), torch.zeros(20)
    b[0], b[19] = math.nan, 5.0
    found = of(a, b)
    assert found.different == 2
    assert math.isnan(found.max_abs)


def test_empty_and_zero_dim() -> None:
    assert of(torch.zeros(0, 3), torch.zeros(0, 3)) == Distance()
    assert of(torch.tensor(1.0), torch.tensor(3.5)) == Distance(1, 1, 2.5, 2.5)
