"""The canonical sum against sums in float64 that are rounded after every addition."""

from __future__ import annotations

import pytest
import torch

from vescale_comm._transport import sums
from vescale_comm._transport.sums import add_in_order, check_sum, divide


def rounded_sum(terms, divisor, accumulate):
    """Add in float64 and round to the dtype of the sum after each step: what that dtype must give."""
    dtype = accumulate or terms[0].dtype
    total = terms[0].to(dtype).double()
    for term in terms[1:]:
        total = (total + term.to(dtype).double()).to(dtype).double()
    return (total / divisor).to(dtype).to(terms[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [None, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_sum_is_rounded_after_every_step(dtype, accumulate, count):
    terms = [(torch.randn(1000) * 10).to(dtype) for _ in range(count)]
    for divisor in (1, 3):
        out = torch.empty(1000, dtype=dtype)
        add_in_order(terms, out, divisor, accumulate)
        assert torch.equal(out, rounded_sum(terms, divisor, accumulate))


@pytest.mark.parametrize("accumulate", [None, torch.float64])
@pytest.mark.parametrize("where", range(4))
def test_result_may_replace_any_term(where, accumulate):
    terms = [torch.randn(500) for _ in range(4)]
    expected = rounded_sum(terms, 4, accumulate)
    add_in_order(terms, terms[where], 4, accumulate)
    assert torch.equal(terms[where], expected)


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_blocks_do_not_change_bits(monkeypatch, accumulate):
    terms = [torch.randn(1001).bfloat16() for _ in range(5)]
    whole, blocks = torch.empty(1001, dtype=torch.bfloat16), torch.empty(1001, dtype=torch.bfloat16)
    add_in_order(terms, whole, 7, accumulate)
    monkeypatch.setattr(sums, "BLOCK", 96)
    add_in_order(terms, blocks, 7, accumulate)
    assert torch.equal(whole, blocks)


def test_order_matters_and_is_that_of_the_terms():
    big, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    out = torch.empty(1)
    add_in_order([big, one, one, -big], out)
    assert out.item() == 0.0  # each 1 is lost beside 2**24
    add_in_order([one, one, big, -big], out)
    assert out.item() == 2.0


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits; of wider ones any, and all around the smallest and largest exponents."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(integer).view(dtype)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    around = (torch.rand(20_000, dtype=torch.float64) * 4 - 2).to(dtype)
    edges = (torch.finfo(dtype).tiny, torch.finfo(dtype).max / 2**15)
    found = [torch.randint(low, high, (20_000,), dtype=integer), *((around * edge).view(integer) for edge in edges)]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype).view(integer)
    steps = torch.arange(-5, 5, dtype=integer)  # the largest numbers, the smallest ones, and their neighbours
    ends = torch.tensor([torch.finfo(dtype).tiny, torch.finfo(dtype).max], dtype=dtype).view(integer)
    return torch.cat([*found, special, (ends[:, None] + steps).flatten(), steps.abs()]).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_quotient_by_a_power_of_two_has_the_bits_of_a_division(dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    numbers = patterns(dtype)
    powers = [2.0**power for power in range(-20, 21)]
    for divisor in (*powers, 2.0**-140, 2.0**100, 3, 0.1, -2.0):
        got, want = numbers.clone(), numbers / divisor
        divide(got, divisor)
        same = (got.view(integer) == want.view(integer)) | (got.isnan() & want.isnan())
        assert same.all(), (divisor, numbers[~same][:3], got[~same][:3], want[~same][:3])


def test_integers_bool_complex_and_float8():
    out = torch.empty(2, dtype=torch.int16)
    add_in_order([torch.tensor([1, -5], dtype=torch.int16)] * 3, out)
    assert out.tolist() == [3, -15]
    flags = torch.empty(2, dtype=torch.bool)
    add_in_order([torch.tensor([True, False]), torch.tensor([True, False])], flags)
    assert flags.tolist() == [True, False]
    numbers = torch.empty(1, dtype=torch.complex64)
    add_in_order([torch.tensor([1 + 2j]), torch.tensor([3 - 1j])], numbers, divisor=2)
    assert numbers.item() == 2 + 0.5j
    small = torch.tensor([1.5, 448.0]).to(torch.float8_e4m3fn)
    add_in_order([small, small, small], small, divisor=3, accumulate=torch.float32)
    assert small.float().tolist() == [1.5, 448.0]


def test_what_cannot_be_summed_is_refused():
    with pytest.raises(ValueError, match=r"does not add in torch.float8_e5m2"):
        check_sum(torch.float8_e5m2, 1, None)
    with pytest.raises(ValueError, match=r"sums in torch.int64 cannot be divided"):
        check_sum(torch.int64, 2, None)
    for divisor in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number other than 0"):
            check_sum(torch.float32, divisor, None)
    check_sum(torch.float8_e5m2, 2, torch.float32)
    check_sum(torch.int64, 1, None)
