"""The laws: each number from its words by the published formula in wider arithmetic, and the statistics of many."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vescale_rng import PortableGenerator
from vescale_rng._portable.laws import last_below, make_law
from vescale_rng._portable.philox import philox_blocks
from vescale_rng.errors import RandomError, UnsupportedRandomOperatorError

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FLOATS = [F32, F64, F16, BF16]
CPU = torch.device("cpu")
N = 200_000
KS = 1.95 / math.sqrt(N)
"""What the largest distance to the distribution function exceeds once in a thousand seeds; ours are fixed."""


def draw(op: str, dtype: torch.dtype, *args: object, n: int = N, seed: int = 11) -> torch.Tensor:
    source = PortableGenerator(seed).source(op, dtype, CPU, (n,), (1,), args)
    out = torch.full((n,), 77, dtype=dtype)
    source.emit(out, 0, args)
    return out


def words(n: int, seed: int = 11) -> np.ndarray:
    """The words of the first blocks, in order, as an (n, 4) array of Python-sized integers."""
    even, odd = philox_blocks(seed, 0, 0, n, CPU)
    return torch.stack((even[0], odd[0], even[1], odd[1]), 1).numpy().astype(np.uint64)


def distance(x: torch.Tensor, cdf: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's distance; `cdf` are the values of the distribution function at sorted `x`."""
    n = len(x)
    steps = torch.arange(n + 1, dtype=F64) / n
    return float(torch.maximum(steps[1:] - cdf, cdf - steps[:-1]).max())


def wide(dtype: torch.dtype) -> bool:
    return dtype == F64


# -- from words, in extended precision -----------------------------------------------------------------------------


def unit(n: int, dtype: torch.dtype) -> np.ndarray:
    """u between 0 and 1 exclusive, per element, as the laws take it for a logarithm."""
    w = words(n)
    if wide(dtype):
        bits = ((w[:, 0::2] << np.uint64(32) | w[:, 1::2]) >> np.uint64(12)).astype(np.longdouble)
        return ((2 * bits + 1) * np.longdouble(2.0) ** -53).reshape(-1)
    return ((2 * w.astype(np.longdouble) + 1) * np.longdouble(2.0) ** -33).reshape(-1)


def close(found: torch.Tensor, exact: np.ndarray, ulps: float) -> None:
    """Within some units of the last place of the result's dtype (of float64's rounding for narrower ones)."""
    exact64 = exact.astype(np.float64)
    if found.dtype != F64:
        rounded = torch.from_numpy(exact64).to(F32).to(found.dtype)
        assert (found != rounded).sum() <= 1e-4 * len(found)
    spacing = torch.finfo(found.dtype).eps * np.abs(exact64) + torch.finfo(found.dtype).smallest_normal
    assert (np.abs(found.double().numpy() - exact64) / spacing).max() < ulps


@pytest.mark.parametrize("dtype", [F32, F64])
def test_uniform_is_the_upper_bits(dtype):
    w = words(500)
    if wide(dtype):
        expected = ((w[:, 0::2] << np.uint64(32) | w[:, 1::2]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    else:
        expected = (w >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    assert np.array_equal(draw("uniform_", dtype, n=expected.size).numpy(), expected.reshape(-1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_is_box_and_muller(dtype):
    count = 20_000
    w = words(count)
    if wide(dtype):
        radius = unit(count, dtype)[0::2]
        angle = (w[:, 2] << np.uint64(32) | w[:, 3]) >> np.uint64(10)
        bits = 54
    else:
        radius = unit(count, dtype)[0::2]
        angle = w[:, 1::2].reshape(-1)
        bits = 32
    span = 1 << (bits - 2)
    turn = (2 * (angle & np.uint64(span - 1)).astype(np.longdouble) + 1 - span) * (np.longdouble(np.pi) / 4 / span)
    pair = np.stack((np.cos(turn), np.sin(turn)), 1)
    swapped = (angle >> np.uint64(bits - 2)) & np.uint64(1) == 1
    pair[swapped] = pair[swapped][:, ::-1]
    sign = 1 - 2 * (angle >> np.uint64(bits - 1)).astype(np.longdouble)
    exact = (np.sqrt(-2 * np.log(radius)) * sign)[:, None] * pair
    close(draw("normal_", dtype, 0.0, 1.0, n=exact.size), exact.reshape(-1), 4 if wide(dtype) else 1.01)
    # multiplied and added in float64, rounded once
    scaled = exact.reshape(-1) * np.longdouble(2.5) + np.longdouble(0.5)
    found = draw("normal_", dtype, 0.5, 2.5, n=exact.size).double().numpy()
    eps = torch.finfo(dtype).eps
    assert np.abs(found - scaled.astype(np.float64)).max() < 8 * 13 * eps


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential_is_a_logarithm(dtype):
    exact = -np.log(unit(5000, dtype)) / 2.5
    close(draw("exponential_", dtype, 2.5, n=exact.size), exact, 4 if wide(dtype) else 1.01)


def test_geometric_is_a_quotient_of_logarithms():
    for p in (0.3, 0.9, 1e-3, 1e-12):
        exact = np.ceil(np.log(unit(5000, F64)) / np.log1p(-np.longdouble(p))).astype(np.int64)
        off = (draw("geometric_", torch.int64, p, n=exact.size).numpy() != exact).mean()
        # the quotient of a chance in 1e12 has more digits than a float64 keeps past the point
        assert off < (1e-3 if p == 1e-12 else 1e-9)


# -- statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
class TestDistributions:
    def test_uniform(self, dtype):
        x = draw("uniform_", dtype, -1.0, 3.0).double().sort().values
        assert distance(x, (x + 1) / 4) < KS

    def test_normal(self, dtype):
        x = draw("normal_", dtype, 1.0, 2.0).double()
        for part in (x, x[0::2], x[1::2]):
            z = (part.sort().values - 1) / 2
            assert distance(z, torch.special.ndtr(z)) < 1.95 / math.sqrt(len(z))

    def test_elements_of_a_pair_are_independent(self, dtype):
        z = draw("normal_", dtype).double().view(-1, 2)
        n = len(z)
        assert abs(float((z[:, 0] * z[:, 1]).mean())) < 4 / math.sqrt(n)
        assert abs(float((z[:, 0] ** 2 * z[:, 1] ** 2).mean()) - 1) < 4 * math.sqrt(8 / n)
        angle = torch.atan2(z[:, 1], z[:, 0]).sort().values / (2 * math.pi) + 0.5
        assert distance(angle, angle) < 1.95 / math.sqrt(n)

    def test_exponential(self, dtype):
        x = draw("exponential_", dtype, 3.0).double().sort().values
        assert distance(x, -torch.expm1(-3 * x)) < KS

    def test_cauchy(self, dtype):
        x = draw("cauchy_", dtype, 2.0, 0.5).double().sort().values
        assert distance(x, torch.atan((x - 2) / 0.5) / math.pi + 0.5) < KS

    def test_log_normal(self, dtype):
        x = draw("log_normal_", dtype, 0.5, 0.75).double().sort().values
        assert distance(x, torch.special.ndtr((x.log() - 0.5) / 0.75)) < KS


def test_log_normal_is_the_exponential_of_the_normal():
    z, x = draw("normal_", F64, 0.5, 2.0), draw("log_normal_", F64, 0.5, 2.0)
    torch.testing.assert_close(x, z.exp(), rtol=1e-15, atol=0)


def test_moments_and_tails_of_the_normal():
    z = draw("normal_", F32, n=1_000_000, seed=5).double()
    n = len(z)
    assert abs(float(z.mean())) < 4 / math.sqrt(n)
    assert abs(float((z**2).mean()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((z**3).mean())) < 4 * math.sqrt(15 / n)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / n)
    for t in (2.0, 3.0, 4.0):
        p = 2 * float(torch.special.ndtr(torch.tensor(-t, dtype=F64)))
        assert abs(int((z.abs() > t).sum()) - n * p) < 4 * math.sqrt(n * p)


def test_the_most_extreme_normals():
    """Words of zeros make the largest radius: finite, and as far out as 32 and 52 bits reach."""
    for dtype, bits in ((F32, 33), (F64, 53)):
        law = make_law("normal_", dtype, ())
        even, odd = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)
        out = torch.empty(law.grain, dtype=dtype)
        law.produce(even, odd, out, ())
        assert out.double().pow(2).view(-1, 2).sum(1)[0].item() == pytest.approx(2 * bits * math.log(2), rel=1e-6)
        even, odd = torch.full((2, 1), 2**32 - 1), torch.full((2, 1), 2**32 - 1)
        law.produce(even, odd, out, ())
        assert (out != 0).all()
        assert out.abs().max() < 2.0 ** (1 - bits // 2)


@pytest.mark.parametrize(("p", "grain"), [(0.3, 4), (0.0, 4), (1.0, 4), (2.0**-16, 4), (1e-5, 2), (1 - 1e-5, 2)])
def test_bernoulli(p, grain):
    assert make_law("bernoulli_", F32, (p,)).grain == grain
    ones = int(draw("bernoulli_", F32, p).sum())
    assert abs(ones - N * p) <= 4 * math.sqrt(N * p * (1 - p))


def test_bernoulli_by_word():
    w = words(5000).reshape(-1).astype(np.float64)
    assert np.array_equal(draw("bernoulli_", torch.bool, 0.3, n=w.size).numpy(), w < 0.3 * 2.0**32)
    assert np.array_equal(draw("dropout", F32, 0.25, n=w.size).numpy(), w < 0.75 * 2.0**32)


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_bernoulli_of_a_tensor(dtype):
    p = torch.linspace(0, 1, N, dtype=dtype)
    x = draw("bernoulli_", F32, p)
    u = draw("uniform_", F64)  # 53 bits of the same words
    assert torch.equal(x.bool(), u < p.double())


def test_bernoulli_of_a_tensor_checks_the_chances():
    with pytest.raises(RandomError, match="between 0 and 1"):
        draw("bernoulli_", F32, torch.full((10,), 1.5), n=10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, F32, BF16])
def test_integers_are_even(dtype):
    x = draw("random_", dtype, -3, 10).long() + 3
    counts = torch.bincount(x, minlength=13)
    assert len(counts) == 13
    chi2 = float(((counts - N / 13) ** 2 / (N / 13)).sum())
    assert chi2 < 32.9  # 12 degrees of freedom, 1 in 1000


def test_forms_of_random():
    full = draw("random_", torch.int64)
    assert full.min() >= 0
    assert full.max() > 2**62
    assert set(draw("random_", torch.bool).tolist()) == {False, True}
    assert draw("random_", torch.uint8).max() == 255
    assert torch.equal(draw("random_", torch.int64, 10), draw("random_", torch.int64, 0, 10))
    assert draw("random_", torch.int32, 2**31 - 5, None).unique().tolist() == [2**31 - 5 + i for i in range(5)]
    signed = draw("random_", torch.int64, -(2**63), None)
    assert signed.min() < -(2**62)
    assert signed.max() > 2**62
    assert draw("random_", F16).max() == 2048
    assert draw("random_", F32).max() <= 2**24


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_geometric(p):
    x = draw("geometric_", F32, p)
    assert x.min() == 1
    assert float(x.mean()) == pytest.approx(1 / p, rel=0.02)
    assert float((x == 1).double().mean()) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / N))


def test_geometric_stays_within_small_integers():
    x = draw("geometric_", torch.int8, 1e-3)
    assert x.min() >= 1
    assert x.max() == 127
    assert draw("geometric_", torch.int64, 1e-300).min() > 2**62


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.25), (1000.0, 1008.0), (3.0, 3.0)])
def test_uniform_never_gives_its_end(dtype, start, end):
    x = draw("uniform_", dtype, start, end)
    assert x.min() >= start
    assert x.max() < end or start == end
    law = make_law("uniform_", dtype, (start, end))
    ones = [torch.full((2, 1), 2**32 - 1) for _ in range(2)]
    top = torch.empty(law.grain, dtype=dtype)
    law.produce(*ones, top, ())
    assert (top < end).all() or start == end
    if start == 1.0:  # rounds to the end
        assert (top == last_below(end, dtype)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential_is_positive(dtype):
    law = make_law("exponential_", dtype, (1.0,))
    ones = [torch.full((2, 1), 2**32 - 1) for _ in range(2)]
    out = torch.empty(law.grain, dtype=dtype)
    law.produce(*ones, out, ())
    assert (out > 0).all()


def test_narrow_types_round_the_float32_numbers():
    for op in ("normal_", "exponential_", "cauchy_", "log_normal_"):
        args = (1.0,) if op == "exponential_" else (0.5, 1.5)
        full = draw(op, F32, *args, n=999)
        for dtype in (F16, BF16):
            assert torch.equal(draw(op, dtype, *args, n=999), full.to(dtype))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("uniform_", (1.0, 0.0)),
        ("uniform_", (-3e38, 3e38)),
        ("uniform_", (0.0, math.nan)),
        ("normal_", (0.0, -1.0)),
        ("log_normal_", (0.0, 0.0)),
        ("exponential_", (0.0,)),
        ("cauchy_", (0.0, 0.0)),
        ("geometric_", (0.0,)),
        ("geometric_", (1.0,)),
        ("bernoulli_", (1.5,)),
        ("random_", (5, 5)),
    ],
)
def test_wrong_arguments(op, args):
    with pytest.raises(RandomError, match=f"{op} expects"):
        make_law(op, F32, args)


@pytest.mark.parametrize("op", ["poisson", "binomial", "_standard_gamma", "rrelu"])
def test_no_portable_form(op):
    with pytest.raises(UnsupportedRandomOperatorError, match=op):
        make_law(op, F32, ())


def test_no_portable_form_of_a_dtype():
    with pytest.raises(UnsupportedRandomOperatorError, match=r"normal_ of torch\.complex64"):
        make_law("normal_", torch.complex64, ())
    with pytest.raises(TypeError, match="arguments"):
        make_law("normal_", F32, (1, 2, 3))
