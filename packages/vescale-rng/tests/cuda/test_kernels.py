"""Emulated kernels against a simulation that runs every thread's loop, written from the CUDA sources."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vescale_rng._cuda.kernels import _transform, emulate
from vescale_rng._cuda.laws import law_of
from vescale_rng._cuda.profile import DeviceProfile

SMALL = DeviceProfile("small", 3, 512)  # 6 blocks, 1536 threads
T = SMALL.max_threads
SIZES = [1, 5, 256, 257, T - 1, T, T + 1, 2 * T + 3, 4 * T - 1, 4 * T, 4 * T + 1, 9 * T + 77]
SEED, OFFSET = (7 << 32) + 12345, 24
U = np.uint64


def philox(seed: int, subsequence: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Four words for each pair, last axis; unsigned 64-bit arithmetic as in curand."""
    mask = U(0xFFFFFFFF)
    sub, ctr = np.broadcast_arrays(np.asarray(subsequence, U), np.asarray(counter, U))
    c = [ctr & mask, ctr >> U(32), sub & mask, sub >> U(32)]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = U(0xD2511F53) * c[0], U(0xCD9E8D57) * c[2]
        c = [(b >> U(32)) ^ c[1] ^ U(k[0]), b & mask, (a >> U(32)) ^ c[3] ^ U(k[1]), a & mask]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=-1)


def launch(numel: int, profile: DeviceProfile = SMALL) -> int:
    """Threads, by calc_execution_policy."""
    grid = min((numel + 255) // 256, profile.sms * (profile.max_threads_per_sm // 256))
    return 256 * grid


def grid_stride(numel: int, unroll: int, profile: DeviceProfile = SMALL) -> tuple[np.ndarray, np.ndarray]:
    """distribution_elementwise_grid_stride_kernel: the four words behind each element, and its lane."""
    threads = launch(numel, profile)
    words = np.zeros((numel, 4), U)
    lanes = np.zeros(numel, np.int64)
    rounded = ((numel - 1) // (threads * unroll) + 1) * threads * unroll
    idx = np.arange(threads)
    linear, call = idx.copy(), 0
    while linear[0] < rounded:
        rand = philox(SEED, idx, np.full(threads, OFFSET // 4 + call))
        for ii in range(unroll):
            li = linear + threads * ii
            ok = li < numel
            words[li[ok]], lanes[li[ok]] = rand[ok], ii
        linear, call = linear + threads * unroll, call + 1
    return words, lanes


def u32(word: np.ndarray) -> np.ndarray:
    return (word.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32)


def u64(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (low ^ (high << U(21))).astype(np.float64) * 2.0**-53 + 2.0**-54


def uniforms(numel: int, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.float64:
        words, lane = grid_stride(numel, 2)
        row = np.arange(numel)
        return u64(words[row, 2 * lane], words[row, 2 * lane + 1])
    words, lane = grid_stride(numel, 4)
    return u32(words[np.arange(numel), lane])


def normals(numel: int, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.float64:
        words, lane = grid_stride(numel, 2)
        radius = np.sqrt(-2 * np.log(u64(words[:, 0], words[:, 1])))
        angle = np.pi * ((words[:, 2] ^ (words[:, 3] << U(21))).astype(np.float64) * 2.0**-52 + 2.0**-53)
        return radius * np.where(lane == 0, np.sin(angle), np.cos(angle))
    words, lane = grid_stride(numel, 4)
    row = np.arange(numel)
    radius = np.sqrt(-2 * np.log(u32(words[row, lane // 2 * 2]).astype(np.float64)))
    angle = (words[row, lane // 2 * 2 + 1].astype(np.float64) + 0.5) * 2.0**-32 * 2 * np.pi
    return radius * np.where(lane % 2 == 0, np.sin(angle), np.cos(angle))


def draw(
    op: str, numel: int, dtype: torch.dtype, args: tuple = (), start: int = 0, stop: int | None = None
) -> torch.Tensor:
    law = law_of(op, dtype, (numel,), (1,), args)
    out = torch.empty((numel if stop is None else stop) - start, dtype=dtype)
    given = tuple(a[start:stop] if isinstance(a, torch.Tensor) else a for a in args)
    emulate(law, out, start, given, numel=numel, seed=SEED, offset=OFFSET, profile=SMALL)
    return out


# ------------------------------------------------------------------ exact operators


@pytest.mark.parametrize("numel", SIZES)
def test_uniform_is_exact(numel: int) -> None:
    u = uniforms(numel, torch.float32)
    assert np.array_equal(draw("uniform_", numel, torch.float32).numpy(), np.where(u == 1, np.float32(0), u))
    d = uniforms(numel, torch.float64)
    assert np.array_equal(draw("uniform_", numel, torch.float64).numpy(), np.where(d == 1, 0.0, d))


@pytest.mark.parametrize("numel", [5, 4 * T + 1])
def test_uniform_with_ends(numel: int) -> None:
    u = uniforms(numel, torch.float32).astype(np.float64)
    low, high = np.float32(-0.1), np.float32(0.3)
    exact = (u * np.float64(high - low) + np.float64(low)).astype(np.float32)
    assert np.array_equal(
        draw("uniform_", numel, torch.float32, (-0.1, 0.3)).numpy(), np.where(exact == high, low, exact)
    )
    for dtype in (torch.float16, torch.bfloat16):
        ends = torch.tensor([-0.1, 0.3], dtype=dtype)
        width = float(ends[1] - ends[0])
        values = torch.from_numpy((u * width + float(ends[0])).astype(np.float32)).to(dtype)
        expected = torch.where(values == ends[1], ends[0], values)
        assert torch.equal(draw("uniform_", numel, dtype, (-0.1, 0.3)), expected)
        if dtype == torch.bfloat16 and numel > T:
            assert bool((values == ends[1]).any())  # the upper end does come out before it is moved


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_bernoulli_is_exact(numel: int, dtype: torch.dtype) -> None:
    chance = 0.3 if dtype == torch.float64 else np.float32(0.3)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.from_numpy(uniforms(numel, kind) < chance).to(dtype)
    assert torch.equal(draw("bernoulli_", numel, dtype, (0.3,)), expected)


@pytest.mark.parametrize("numel", SIZES)
def test_random_is_exact(numel: int) -> None:
    words, lane = grid_stride(numel, 4)
    row = np.arange(numel)
    word = words[row, lane]
    assert draw("random_", numel, torch.int64, (-7, 100)).tolist() == [int(w) % 107 - 7 for w in word]
    assert draw("random_", numel, torch.int32).tolist() == [int(w) % 2**31 for w in word]
    assert draw("random_", numel, torch.bool).tolist() == [bool(w & U(1)) for w in word]
    words, lane = grid_stride(numel, 2)
    wide = [int(a) << 32 | int(b) for a, b in zip(words[row, 2 * lane], words[row, 2 * lane + 1], strict=True)]
    assert draw("random_", numel, torch.int64, (5, 2**40)).tolist() == [w % (2**40 - 5) + 5 for w in wide]
    assert draw("random_", numel, torch.int64).tolist() == [w % 2**63 for w in wide]
    signed = [w - 2**64 if w >= 2**63 else w for w in wide]
    assert draw("random_", numel, torch.int64, (-(2**63), None)).tolist() == signed


# ------------------------------------------------------------------ operators with approximate steps on the device


@pytest.mark.parametrize("numel", [5, T + 1, 4 * T + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transforms_stand_at_the_right_places(numel: int, dtype: torch.dtype) -> None:
    z, u = normals(numel, dtype).astype(np.float64), uniforms(numel, dtype).astype(np.float64)
    near: dict[str, tuple[tuple, np.ndarray]] = {
        "normal_": ((2.0, 3.0), z * 3 + 2),
        "log_normal_": ((0.5, 0.25), np.exp(z * 0.25 + 0.5)),
        "exponential_": ((0.5,), -2 * np.log(u)),
        "cauchy_": ((1.0, 2.0), 1 + 2 * np.tan(np.pi * (u - 0.5))),
    }
    for op, (args, expected) in near.items():
        got = draw(op, numel, dtype, args).numpy().astype(np.float64)
        # Float32 loses digits in the angles near the poles of the tangent, and where the logarithm is near 0.
        tolerance = 1e-12 if dtype == torch.float64 else 3e-4 if op == "cauchy_" else 5e-6
        size = np.maximum(np.abs(expected), 1.0) ** (2 if op == "cauchy_" else 1)
        assert np.max(np.abs(got - expected) / size) < tolerance, op
    trials = np.ceil(np.log(u) / math.log(0.7))
    got = draw("geometric_", numel, dtype, (0.3,)).numpy()
    assert np.mean(got != trials) < 1e-3


def test_normal_in_half_types_is_the_rounded_float32() -> None:
    whole = draw("normal_", 4 * T + 1, torch.float32, (1.0, 0.5))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(draw("normal_", 4 * T + 1, dtype, (1.0, 0.5)), whole.to(dtype))


def test_exponential_is_never_zero() -> None:
    law = law_of("exponential_", torch.float32, (1,), (1,), ())
    top = torch.tensor([2**32 - 1, 2**32 - 200])
    values = _transform(law, (2.0,))((top, top, top, top), 0)
    assert values.tolist() == [2.0**-24 / 2, 2.0**-24 / 2]


# ------------------------------------------------------------------ dropout and bernoulli with a tensor


def dropout_uniforms(numel: int, vector: int) -> np.ndarray:
    """fused_dropout_kernel_vec: every thread's loop, with its state and the flag that never toggles."""
    if vector == 1:
        return uniforms(numel, torch.float32)
    threads = launch(numel)
    out = np.full(numel, np.nan, np.float32)
    idx = np.arange(threads)
    linear, call = idx * vector, 0
    while linear[0] < numel:
        rand = [u32(philox(SEED, idx, np.full(threads, OFFSET // 4 + call + k))) for k in range((vector + 3) // 4)]
        call += len(rand)
        for jj, quad in enumerate(rand):
            for ii in range(min(vector, 4)):
                at = linear + jj * 4 + ii
                ok = linear < numel
                out[at[ok]] = quad[ok, ii]
        linear = linear + threads * vector
    assert not np.isnan(out).any()
    return out


@pytest.mark.parametrize(
    ("dtype", "vector"),
    [
        (torch.float32, 1),
        (torch.float32, 2),
        (torch.float32, 4),
        (torch.bfloat16, 8),
        (torch.float16, 4),
        (torch.float64, 2),
    ],
)
@pytest.mark.parametrize("numel", [8, 256, 264, T, 4 * T - 8, 4 * T, 4 * T + 8, 8 * T + 8, 17 * T + 8])
def test_dropout_masks_are_exact(dtype: torch.dtype, vector: int, numel: int) -> None:
    u = dropout_uniforms(numel, vector)
    keep = u.astype(np.float64) < 1 - 0.3 if dtype == torch.float64 else u < np.float32(1 - 0.3)
    assert torch.equal(draw("dropout", numel, dtype, (0.3, vector)), torch.from_numpy(keep).to(dtype))


@pytest.mark.parametrize("numel", [1, 3, 4, 2047, 2048, 9 * T + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_bernoulli_with_a_tensor_is_exact(numel: int, dtype: torch.dtype) -> None:
    """CUDA_tensor_apply2 with step 4: thread i // 4, one call, `<=`."""
    chances = torch.linspace(0, 1, numel, dtype=torch.float64)
    words = philox(SEED, np.arange(-(-numel // 4)), np.full(-(-numel // 4), OFFSET // 4)).reshape(-1)[:numel]
    compared = chances.numpy() if dtype == torch.float64 else chances.numpy().astype(np.float32)
    expected = torch.from_numpy(u32(words) <= compared).to(dtype)
    assert torch.equal(draw("bernoulli_", numel, dtype, (chances,)), expected)


def test_bernoulli_with_a_tensor_keeps_an_equal_chance_and_with_a_number_does_not() -> None:
    words = philox(SEED, np.arange(16), np.full(16, OFFSET // 4)).reshape(-1)
    chances = torch.from_numpy(u32(words))
    assert bool(draw("bernoulli_", 64, torch.float32, (chances,)).all())
    first = float(uniforms(1, torch.float32)[0])
    assert not bool(draw("bernoulli_", 1, torch.float32, (first,)))


# ------------------------------------------------------------------ ranges

RANGED: list[tuple[str, torch.dtype, Callable[[int], tuple]]] = [
    ("uniform_", torch.float32, lambda n: ()),
    ("uniform_", torch.float64, lambda n: (1.0, 2.0)),
    ("normal_", torch.float32, lambda n: ()),
    ("normal_", torch.float64, lambda n: (1.0, 2.0)),
    ("random_", torch.int64, lambda n: (0, 2**40)),
    ("bernoulli_", torch.bool, lambda n: (0.5,)),
    ("bernoulli_", torch.float32, lambda n: (torch.linspace(0, 1, n),)),
    ("dropout", torch.float32, lambda n: (0.5, 1)),
    ("dropout", torch.float32, lambda n: (0.5, 2)),
    ("dropout", torch.float32, lambda n: (0.5, 4)),
    ("dropout", torch.bfloat16, lambda n: (0.5, 8)),
]


@pytest.mark.parametrize(("op", "dtype", "args"), RANGED)
def test_any_range_is_a_slice_of_the_whole(op: str, dtype: torch.dtype, args: Callable[[int], tuple]) -> None:
    numel = 9 * T + 80
    whole = draw(op, numel, dtype, args(numel))
    for start, stop in ((0, 1), (T - 3, T + 5), (3, 4 * T + 1), (4 * T - 1, 8 * T + 9), (8 * T + 5, numel), (7, 7)):
        assert torch.equal(draw(op, numel, dtype, args(numel), start, stop), whole[start:stop]), (start, stop)


def test_elements_of_a_large_draw_on_an_h100() -> None:
    h100 = DeviceProfile.of("H100")
    threads, numel = h100.max_threads, 4_000_000
    law = law_of("uniform_", torch.float32, (numel,), (1,), ())
    assert law.increment(numel, h100) == 16
    expected = {
        0: 0.39904648,
        threads - 1: 0.93987834,
        threads: 0.8805202,
        2 * threads: 0.73571277,
        4 * threads - 1: 0.7285052,
    }
    for at, value in expected.items():
        out = torch.empty(1)
        emulate(law, out, at, (), numel=numel, seed=0, offset=0, profile=h100)
        assert float(out) == np.float32(value)
