"""`draws` and `advance` against what torch takes: states after its calls, and raw words counted by numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vescale_rng import (
    DeviceProfile,
    EmulatedGenerator,
    PortableGenerator,
    Stream,
    advance,
    draws,
    emulate_cuda,
    errors,
    portable,
)

CALLS: dict[str, tuple[str, tuple[Any, ...], torch.dtype | None, Callable[..., Any]]] = {
    "rand": ("rand", (), None, torch.rand),
    "rand of doubles": ("rand", (), torch.float64, lambda s: torch.rand(s, dtype=torch.float64)),
    "rand of halves": ("rand", (), torch.float16, lambda s: torch.rand(s, dtype=torch.float16)),
    "rand of complex": ("rand", (), torch.complex64, lambda s: torch.rand(s, dtype=torch.complex64)),
    "rand of complex doubles": ("rand", (), torch.complex128, lambda s: torch.rand(s, dtype=torch.complex128)),
    "randn": ("randn", (), None, torch.randn),
    "randn of doubles": ("randn", (), torch.float64, lambda s: torch.randn(s, dtype=torch.float64)),
    "randn of bfloats": ("randn", (), torch.bfloat16, lambda s: torch.randn(s, dtype=torch.bfloat16)),
    "randn of complex": ("randn", (), torch.complex64, lambda s: torch.randn(s, dtype=torch.complex64)),
    "uniform_": ("uniform_", (-1.0, 1.0), None, lambda s: torch.empty(s).uniform_(-1.0, 1.0)),
    "normal": ("normal", (1.0, 2.0), None, lambda s: torch.normal(1.0, 2.0, s)),
    "randint": ("randint", (9,), None, lambda s: torch.randint(9, s)),
    "randint of many": ("randint", (2**28,), None, lambda s: torch.randint(2**28, s)),
    "randint_like": ("randint_like", (3, 9), None, lambda s: torch.randint_like(torch.empty(s), 3, 9)),
    "random_": ("random_", (), torch.int64, lambda s: torch.empty(s, dtype=torch.int64).random_()),
    "random_ of int32": ("random_", (), torch.int32, lambda s: torch.empty(s, dtype=torch.int32).random_()),
    "bernoulli_": ("bernoulli_", (0.3,), None, lambda s: torch.empty(s).bernoulli_(0.3)),
    "bernoulli_ of 0": ("bernoulli_", (0.0,), None, lambda s: torch.empty(s).bernoulli_(0.0)),
    "bernoulli_ of chances": ("bernoulli_", (torch.tensor(0.5),), None, lambda s: torch.bernoulli(torch.full(s, 0.5))),
    "dropout": ("dropout", (0.3,), None, lambda s: functional.dropout(torch.ones(s), 0.3)),
    "dropout of 0": ("dropout", (0.0,), None, lambda s: functional.dropout(torch.ones(s), 0.0)),
    "dropout of 1": ("dropout", (1,), None, lambda s: functional.dropout(torch.ones(s), 1)),
    "alpha_dropout": ("dropout", (0.3,), None, lambda s: functional.alpha_dropout(torch.ones(s), 0.3, True)),
    "native_dropout": ("bernoulli_", (0.7,), None, lambda s: torch.native_dropout(torch.ones(s), 0.3, True)),
    "exponential_": ("exponential_", (), None, lambda s: torch.empty(s).exponential_()),
    "gumbel_softmax": ("exponential_", (), None, lambda s: functional.gumbel_softmax(torch.ones(s), dim=-1)),
    "cauchy_": ("cauchy_", (), torch.bfloat16, lambda s: torch.empty(s, dtype=torch.bfloat16).cauchy_()),
    "log_normal_": ("log_normal_", (), None, lambda s: torch.empty(s).log_normal_()),
    "geometric_": ("geometric_", (0.3,), torch.int32, lambda s: torch.empty(s, dtype=torch.int32).geometric_(0.3)),
}
SHAPES: list[tuple[int, ...]] = [(0,), (1,), (5,), (15,), (16,), (17,), (4, 33), (2, 3, 104)]


def words_between(before: Tensor, after: Tensor) -> int:
    """Count with numpy how many words lie between two states of a CPU generator."""

    def engine(state: Tensor) -> Any:
        key = state[24:5016].view(torch.int64).numpy().astype(np.uint32)
        left, following = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
        made = np.random.MT19937()
        made.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624 if left == 1 else following}}
        return made

    ahead = engine(after).random_raw(4)
    raw = engine(before).random_raw(6000)
    starts = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(raw, 4).__eq__(ahead).all(axis=1))
    assert len(starts) == 1
    return int(starts[0])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("waiting", [False, True])
def test_counts_are_those_of_torch(name: str, waiting: bool) -> None:
    op, args, dtype, call = CALLS[name]
    for shape in SHAPES:
        torch.manual_seed(4)
        torch.rand(600)
        if waiting:
            torch.randn(1)
        before = torch.get_rng_state()
        call(shape)
        after = torch.get_rng_state()
        assert draws(op, shape, *args, dtype=dtype, waiting=waiting) == words_between(before, after)
        generator = torch.Generator()
        generator.set_state(before)
        advance(generator, op, shape, *args, dtype=dtype)
        assert torch.equal(generator.get_state(), after)


@pytest.mark.parametrize(
    ("op", "dtype"), list(itertools.product(["normal_", "uniform_"], [torch.float32, torch.bfloat16]))
)
def test_strided_tensors(op: str, dtype: torch.dtype) -> None:
    """Normal numbers of strided tensors come in pairs, 4 words each."""
    whole = torch.empty(9, 5, dtype=dtype).t()
    generator, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    getattr(whole, op)(generator=generator)
    advance(other, op, whole.shape, dtype=dtype, stride=whole.stride())
    assert torch.equal(other.get_state(), generator.get_state())
    assert draws(op, whole.shape, dtype=dtype, stride=whole.stride()) == (92 if op == "normal_" else 45)


def test_huge_tensors_are_counted_and_passed_over() -> None:
    assert draws("rand", (10**6, 10**6)) == 10**12
    assert draws("randn", (10**9 + 1,)) == 10**9 + 17
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    advance(one, "rand", (3 * 10**9,))
    for _ in range(3):
        advance(other, "dropout", (5 * 10**8,), 0.1)
    assert torch.equal(one.get_state(), other.get_state())


def test_counting_touches_no_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draws("randn", (3,), waiting=True)
    draws("bernoulli_", (30,), 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_tells_whether_a_normal_waits() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    stream = Stream(generator)
    at = stream.position
    torch.randn(4, generator=generator)
    assert stream.position - at == draws("randn", (4,), waiting=True) == 8


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16])
def test_waiting_of_a_stream_is_what_draws_asks_for(n: int) -> None:
    stream = Stream(torch.Generator().manual_seed(1))
    for _ in range(4):
        at, count = stream.position, draws("randn", (n,), waiting=stream.waiting)
        torch.randn(n, generator=stream.generator)
        assert stream.position - at == count


def test_default_dtypes() -> None:
    assert draws("rand", (3,)) == 3
    torch.set_default_dtype(torch.float64)
    try:
        assert draws("rand", (3,)) == 6
    finally:
        torch.set_default_dtype(torch.float32)
    assert draws("random_", (3,)) == 3  # of float32
    assert draws("randint", (3,), 2**28) == 6


def test_what_cannot_be_counted() -> None:
    for op in ("poisson", "multinomial", "nonsense"):
        with pytest.raises(errors.UnsupportedRandomOperatorError, match=f"{op}: no closed form"):
            draws(op, (3,))
        generator = torch.Generator()
        before = generator.get_state()
        with pytest.raises(errors.UnsupportedRandomOperatorError, match=f"{op}: no closed form"):
            advance(generator, op, (3,))
        assert torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        draws("dropout", (3,), 1.5)
    with pytest.raises(errors.LayoutError, match="stride"):
        draws("rand", (3,), stride=(1, 1))
    with pytest.raises(RuntimeError, match="uniform_ expects"):
        advance(torch.Generator(), "uniform_", (3,), 2.0, 1.0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["portable", "emulate_cuda"])
def test_advance_in_a_block_moves_the_block(name: str, kind: str) -> None:
    op, args, dtype, call = CALLS[name]
    if kind == "emulate_cuda" and name == "bernoulli_ of chances":
        args = (torch.full((1,), 0.5),)
    for shape in SHAPES:
        with portable(5) if kind == "portable" else emulate_cuda("A100", seed=5) as generator:
            torch.rand(3)
            call(shape)
            expected = generator.get_state()
            generator.manual_seed(5)
            torch.rand(3)
            advance(torch.default_generator, op, shape, *args, dtype=dtype)
            assert torch.equal(generator.get_state(), expected)
            generator.manual_seed(5)
            torch.rand(3)
            advance(generator, op, shape, *args, dtype=dtype)
            assert torch.equal(generator.get_state(), expected)


def test_advance_of_generators_of_this_package() -> None:
    for generator in (PortableGenerator(5), EmulatedGenerator(DeviceProfile.of("A100"), 5)):
        before = torch.get_rng_state()
        start = generator.get_state()
        advance(generator, "rand", (3,))
        moved = generator.get_state()
        assert not torch.equal(moved, start)
        with pytest.raises(errors.UnsupportedRandomOperatorError, match="poisson"):
            advance(generator, "poisson", (3,))
        assert torch.equal(generator.get_state(), moved)
        assert torch.equal(torch.get_rng_state(), before)
    gpu = EmulatedGenerator(DeviceProfile.of("A100"), 5)
    advance(gpu, "randn", (10**6,), dtype=torch.complex64)
    with emulate_cuda("A100", seed=5) as generator:
        torch.randn(10**6, dtype=torch.complex64)
    assert gpu.get_offset() == generator.get_offset() > 4


@pytest.mark.parametrize("wrong", [None, 3, "cpu", torch.Generator])
def test_what_is_no_generator(wrong: Any) -> None:
    with pytest.raises(TypeError, match="generator: expected a"):
        advance(wrong, "rand", (3,))
