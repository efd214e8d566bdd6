"""Laws: unroll, increments, the range of random_ (torch's CPU kernel as oracle), vector sizes, and splits."""

import itertools
import math

import numpy as np
import pytest
import torch

from vescale_rng._cuda import laws
from vescale_rng._cuda.kernels import _cast, _default_width, _unsigned_remainder
from vescale_rng._cuda.laws import (
    Law,
    dropout_scale,
    law_of,
    logical_order,
    logical_positions,
    pieces,
    random_range,
    vector_size,
)
from vescale_rng._cuda.profile import DeviceProfile
from vescale_rng.errors import UnsupportedRandomOperatorError

H100 = DeviceProfile.of("H100")
HALF = (torch.float16, torch.bfloat16)


def flat_law(kernel: str, dtype: torch.dtype, *args: object) -> Law:
    return law_of(kernel, dtype, (8,), (1,), args)


@pytest.mark.parametrize("kernel", "uniform_ normal_ log_normal_ exponential_ cauchy_ geometric_ bernoulli_".split())
def test_unroll_follows_the_accumulation_type(kernel: str) -> None:
    for dtype, unroll in ((torch.float32, 4), (torch.float64, 2), *((h, 4) for h in HALF)):
        assert flat_law(kernel, dtype, 0.5).unroll == unroll


@pytest.mark.parametrize(
    ("dtype", "args", "unroll"),
    [
        (torch.int64, (0, 2**28 - 1), 4),
        (torch.int64, (0, 2**28), 2),
        (torch.int32, (-(2**27), 2**27), 2),
        (torch.float32, (0, 2**28), 4),  # the upper end moves down to the next float32
        (torch.float64, (0, 2**28), 2),
        (torch.int64, (), 2),
        (torch.float64, (), 2),
        (torch.int32, (), 4),
        (torch.float32, (), 4),
        (torch.int64, (-(2**63), None), 2),
        (torch.int8, (3, None), 4),
        (torch.int32, (0, None), 2),
        (torch.uint32, (0, 2**32 - 1), 2),
    ],
)
def test_unroll_of_random(dtype: torch.dtype, args: tuple[int | None, ...], unroll: int) -> None:
    assert flat_law("random_", dtype, *args).unroll == unroll


@pytest.mark.parametrize(
    ("numel", "dtype", "increment"),
    [
        (1, torch.float32, 4),
        (270_336 * 4, torch.float32, 4),
        (270_336 * 4 + 1, torch.float32, 8),
        (4_000_000, torch.float32, 16),
        (270_336 * 2, torch.float64, 4),
        (270_336 * 2 + 1, torch.float64, 8),
    ],
)
def test_increments(numel: int, dtype: torch.dtype, increment: int) -> None:
    assert flat_law("uniform_", dtype).increment(numel, H100) == increment


def test_other_increments() -> None:
    assert flat_law("bernoulli_", torch.float32, torch.zeros(8)).increment(10**9, H100) == 12
    assert flat_law("dropout", torch.float64, 0.1).increment(270_336 * 4 + 2, H100) == 8
    assert flat_law("uniform_", torch.float32).increment(0, H100) == 0


# ------------------------------------------------------------------ random_

RANGES = {
    torch.uint8: [(0, 256), (3, 4), (200, None)],
    torch.int8: [(-128, 128), (-5, None)],
    torch.int32: [(-(2**31), 2**31), (7, None), (0, 2**28 - 1), (0, 2**28)],
    torch.int64: [(-(2**63), None), (0, None), (-(2**62), 2**62), (5, 2**63 - 1), (-(2**63), 2**63 - 1), (-9, 2**33)],
    torch.bool: [(0, 2), (0, None)],
    torch.float16: [(-2048, 2048), (0, 2000), (5, None)],
    torch.bfloat16: [(-256, 256), (-200, 255), (0, None)],
    torch.float32: [(0, 2**24), (-(2**24), 2**24), (1, None), (2**23 + 1, 2**24)],
    torch.float64: [(0, 2**53), (-(2**53), 2**53), (3, None)],
    torch.uint16: [(0, 65536)],
    torch.uint32: [(0, 2**32 - 1)],
    torch.uint64: [(0, 2**40)],
}


@pytest.mark.parametrize(("dtype", "ends"), [(d, r) for d, rs in RANGES.items() for r in rs])
def test_random_matches_torch_on_the_same_words(dtype: torch.dtype, ends: tuple[int, int | None]) -> None:
    """torch's CPU kernel maps words to integers in the same way; the generators differ."""
    count = 2000
    expected = torch.empty(count, dtype=dtype).random_(*ends, generator=torch.Generator().manual_seed(3))
    low, width = random_range(dtype, ends)
    words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(3))
    if width < 2**28:
        half = words[: count // 2]
        words = torch.stack((half >> 32 & 0xFFFFFFFF, half & 0xFFFFFFFF), dim=1).view(-1)
    values = _cast(_unsigned_remainder(words, width) + low, dtype)
    assert torch.equal(values.to(torch.float64), expected.to(torch.float64))


@pytest.mark.parametrize("dtype", [d for d in RANGES if d not in (torch.uint16, torch.uint32, torch.uint64)])
def test_random_without_ends(dtype: torch.dtype) -> None:
    count = 2000
    expected = torch.empty(count, dtype=dtype).random_(generator=torch.Generator().manual_seed(4))
    words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(4))
    if dtype not in (torch.int64, torch.float64):
        half = words[: count // 2]
        words = torch.stack((half >> 32 & 0xFFFFFFFF, half & 0xFFFFFFFF), dim=1).view(-1)
    values = _cast(_unsigned_remainder(words, _default_width(dtype)), dtype)
    assert torch.equal(values, expected)


@pytest.mark.filterwarnings("ignore:.*out of bounds:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "ends"),
    [
        (torch.float16, (0, 65504)),
        (torch.float16, (2049, 4097)),
        (torch.bfloat16, (-257, 1000)),
        (torch.bfloat16, (513, 771)),
        (torch.float32, (2**24 + 1, 2**26 + 3)),
        (torch.float32, (0, 2**28)),
        (torch.float64, (2**53 + 1, 2**60 + 1)),
    ],
)
def test_ends_that_a_type_cannot_hold(dtype: torch.dtype, ends: tuple[int, int]) -> None:
    count = 4000
    expected = torch.empty(count, dtype=dtype).random_(*ends, generator=torch.Generator().manual_seed(5))
    low, width = random_range(dtype, ends)
    words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=torch.Generator().manual_seed(5))
    if width < 2**28:
        half = words[: count // 2]
        words = torch.stack((half >> 32 & 0xFFFFFFFF, half & 0xFFFFFFFF), dim=1).view(-1)
    assert torch.equal(_cast(_unsigned_remainder(words, width) + low, dtype), expected)


def test_empty_range() -> None:
    with pytest.raises(RuntimeError, match="random_ expects 'from' to be less than 'to', but got from=5 >= to=5"):
        random_range(torch.int64, (5, 5))


@pytest.mark.parametrize("width", [1, 3, 2**28, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1, 2**64])
def test_unsigned_remainder(width: int) -> None:
    values = [0, 1, 5, 2**28, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**63 + 7, 2**64 - 2, 2**64 - 1]
    signed = torch.tensor([v - 2**64 if v >= 2**63 else v for v in values])
    assert [v % 2**64 for v in _unsigned_remainder(signed, width).tolist()] == [v % width for v in values]


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize(
    ("dtype", "shape", "stride", "address", "vector"),
    [
        (torch.float32, (8,), (1,), 0, 4),
        (torch.float32, (6,), (1,), 0, 2),
        (torch.float32, (7,), (1,), 0, 1),
        (torch.float32, (8,), (1,), 8, 2),
        (torch.float32, (8,), (1,), 4, 1),
        (torch.float64, (8,), (1,), 0, 2),
        (torch.float16, (8,), (1,), 0, 8),
        (torch.bfloat16, (12,), (1,), 0, 4),
        (torch.bfloat16, (16,), (1,), 8, 4),
        (torch.float32, (4, 4), (1, 4), 0, 4),
        (torch.float32, (4, 4), (8, 1), 0, 1),
        (torch.float32, (8,), (0,), 0, 1),
        (torch.float32, (1, 8), (99, 1), 0, 4),
    ],
)
def test_vector_size(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], address: int, vector: int
) -> None:
    assert vector_size(dtype, shape, stride, address) == vector


def test_dropout_laws() -> None:
    assert flat_law("dropout", torch.float32, 0.1) == Law("dropout", torch.float32, "vector", 4)
    assert flat_law("dropout", torch.float32, 0.1, 1) == Law("dropout", torch.float32, "grid", 4)
    assert flat_law("dropout", torch.bfloat16, 0.1).round_offset() == 8
    assert law_of("dropout", torch.float32, (3, 5), (1, 3), (0.1,)) == Law("dropout", torch.float32, "grid", 4)
    with pytest.raises(UnsupportedRandomOperatorError, match="vector size 3"):
        flat_law("dropout", torch.float32, 0.1, 3)


@pytest.mark.parametrize(
    ("shape", "stride", "out_of_order"),
    [
        ((3, 5), (5, 1), False),
        ((3, 5), (1, 3), True),
        ((4, 6), (1, 8), True),  # gaps
        ((4, 6), (12, 2), False),
        ((4, 6), (1, 4), False),  # several elements at a time: memory order
        ((3, 1, 5), (5, 1, 1), False),
        ((3, 1, 5), (5, 99, 1), False),
        ((3, 3, 5), (15, 1, 3), True),
    ],
)
def test_dropout_in_logical_order(shape: tuple[int, ...], stride: tuple[int, ...], out_of_order: bool) -> None:
    law = law_of("dropout", torch.float32, shape, stride, (0.1,))
    assert logical_order(law, shape, stride) == out_of_order
    assert not logical_order(law_of("uniform_", torch.float32, shape, stride, ()), shape, stride)
    numel = math.prod(shape)
    places = torch.arange(numel).view(shape)
    in_memory = [int(places[i]) for i in sorted(np.ndindex(shape), key=lambda i: np.dot(i, stride))]
    assert logical_positions(0, numel, shape, stride).tolist() == in_memory
    assert logical_positions(2, numel - 1, shape, stride).tolist() == in_memory[2:-1]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("kernel", "dtype", "args", "message"),
    [
        ("poisson", torch.float32, (), "poisson: what a GPU draws .* Modelled: bernoulli_, cauchy_"),
        ("uniform_", torch.int64, (), r"uniform_ on a GPU: dtype=torch.int64 is not supported"),
        ("normal_", torch.complex64, (), "view_as_real"),
        ("random_", torch.uint16, (), "dtype=torch.uint16"),
        ("random_", torch.float16, (-(2**63), None), "not int64, float64, float32 or bfloat16"),
        ("dropout", torch.bool, (0.1,), "dropout on a GPU: dtype=torch.bool"),
    ],
)
def test_refusals(kernel: str, dtype: torch.dtype, args: tuple[object, ...], message: str) -> None:
    with pytest.raises(UnsupportedRandomOperatorError, match=message):
        law_of(kernel, dtype, (8,), (1,), args)


# ------------------------------------------------------------------ beyond 32-bit indexing


def fits(numel: int, size: int) -> bool:
    """TensorIterator's rule for a dense tensor: both the elements and the last byte's offset."""
    return numel <= 2**31 - 1 and 1 + (numel - 1) * size <= 2**31 - 1


def expected_pieces(numel: int, size: int, unroll: int, threads: int) -> tuple[list[tuple[int, int, int]], int]:
    """The front half, with all of its own halves, before the back half."""

    def increment(count: int) -> int:
        return 4 * math.ceil(count / (min(threads, 256 * math.ceil(count / 256)) * unroll))

    def leaves(start: int, count: int) -> list[tuple[int, int]]:
        if fits(count, size):
            return [(start, count)]
        return leaves(start, count // 2) + leaves(start + count // 2, count - count // 2)

    offset, found = increment(numel), []
    if fits(numel, size):
        return [(0, numel, 0)], offset
    for start, count in leaves(0, numel):
        found.append((start, count, offset))
        offset += increment(count)
    return found, offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("numel", [2**28, 2**28 + 1, 2**29, 2**29 + 1, 2**30 + 1, 2**31 - 1, 2**31, 3 * 2**31 + 5])
def test_pieces(dtype: torch.dtype, numel: int) -> None:
    law = flat_law("random_", dtype, 0, 100) if dtype == torch.int8 else flat_law("uniform_", dtype)
    assert pieces(law, (numel,), (1,), H100) == expected_pieces(numel, dtype.itemsize, law.unroll, H100.max_threads)


def test_a_power_of_two_just_fits() -> None:
    law = flat_law("uniform_", torch.float32)
    assert [len(pieces(law, (n,), (1,), H100)[0]) for n in (2**29, 2**29 + 1)] == [1, 2]


def test_pieces_of_permuted_and_gappy_tensors() -> None:
    law = flat_law("uniform_", torch.float32)
    shape = (2**15, 2**15)
    permuted = pieces(law, shape, (1, 2**15), H100)
    assert permuted == pieces(law, (2**30,), (1,), H100)
    with pytest.raises(UnsupportedRandomOperatorError, match="too large for 32-bit offsets and has gaps"):
        pieces(law, shape, (2**16, 1), H100)


def test_dropout_and_tensor_bernoulli_are_never_split() -> None:
    for law in (flat_law("dropout", torch.float32, 0.1), flat_law("bernoulli_", torch.float32, torch.zeros(8))):
        assert pieces(law, (2**33,), (1,), H100)[0] == [(0, 2**33, 0)]


def test_every_kernel_has_a_law() -> None:
    for kernel, dtype in itertools.product(laws.KERNELS, (torch.float32, torch.float64, *HALF)):
        args = (0.5,) if kernel in ("bernoulli_", "geometric_", "dropout") else ()
        assert flat_law(kernel, dtype, *args).unroll in (2, 4, 8)


def test_dropout_scale_rounds_the_chance_to_keep_first() -> None:
    assert dropout_scale(0.25, torch.float32) == float(torch.tensor(1 / 0.75, dtype=torch.float32))
    differs = 0
    for percent in range(1, 100):
        p = percent / 100
        keep = float(torch.tensor(1 - p, dtype=torch.float32))
        assert dropout_scale(p, torch.bfloat16) == float(torch.tensor(1 / keep, dtype=torch.float32))
        differs += dropout_scale(p, torch.float32) != float(torch.tensor(1 / (1 - p), dtype=torch.float32))
        assert dropout_scale(p, torch.float64) == 1 / (1 - p)
    assert differs
