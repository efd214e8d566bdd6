"""Moving a generator past words against drawing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_rng._streams import advance
from vescale_rng._streams.advance import advance_words
from vescale_rng._streams.jump import Polynomials, jump_blocks

Step = Callable[[torch.Generator, int], None]
COUNTS = [0, 1, 2, 3, 7, 100, 101, 622, 623, 624, 625, 1023, 1025, 1248, 1249, 65535, 65536, 65537, 131073, 624 * 5000]


@pytest.mark.parametrize("used", [0, 1, 311, 623, 624, 1248])
@pytest.mark.parametrize("words", COUNTS)
def test_as_if_drawn(step: Step, words: int, used: int) -> None:
    moved, stepped = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    step(moved, used)
    step(stepped, used + words)
    advance_words(moved, words)
    assert torch.equal(moved.get_state(), stepped.get_state())


@pytest.mark.slow
@pytest.mark.parametrize(("used", "words"), [(5, 40_000_123), (0, 624 * 30_000), (624, 624 * 10_000), (100, 9_999_999)])
def test_far_away(step: Step, used: int, words: int) -> None:
    moved, stepped = torch.Generator().manual_seed(2**40 + 3), torch.Generator().manual_seed(2**40 + 3)
    step(moved, used)
    step(stepped, used + words)
    advance_words(moved, words)
    assert torch.equal(moved.get_state(), stepped.get_state())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2000),
    st.one_of(st.integers(0, 5000), st.integers(0, 10).map(lambda k: 624 * k), st.integers(900_000, 3_000_000)),
    st.integers(-(2**63), 2**64 - 1),
    st.booleans(),
)
def test_any_place_and_count(used: int, words: int, seed: int, normal: bool) -> None:
    moved, stepped = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    for generator in (moved, stepped):
        torch.empty(used).uniform_(generator=generator)
        torch.randn(3 if normal else 2, generator=generator)
    advance_words(moved, words)
    torch.empty(words).uniform_(generator=stepped)
    assert torch.equal(moved.get_state(), stepped.get_state())


def test_words_are_those_of_numpy(numpy_words: Callable[[int, int], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(77 + (9 << 32))  # only the low 32 bits of a seed count
    advance_words(generator, 3_000_001)
    expected = numpy_words(77, 3_000_001 + 500)[3_000_001:]
    drawn = torch.empty(500, dtype=torch.int64).random_(0, 2**27, generator=generator)
    assert torch.equal(drawn, expected % 2**27)


def test_published_word() -> None:
    """The C++ standard, [rand.predef]: the 10000th word of mt19937 with seed 5489 is 4123659995."""
    generator = torch.Generator().manual_seed(5489)
    advance_words(generator, 9999)
    assert torch.rand(1, generator=generator).item() == (4123659995 % 2**24) / 2**24


def test_counts_that_come_twice_are_jumped(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps: list[int] = []

    def record(generator: torch.Generator, blocks: int) -> None:
        jumps.append(blocks)
        jump_blocks(generator, blocks)

    monkeypatch.setattr(advance, "jump_blocks", record)
    monkeypatch.setattr(advance, "polynomials", Polynomials())
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(3):
        generator.manual_seed(0)
        advance_words(generator, 1_500_000)
        states.append(generator.get_state())
    assert jumps == [1_500_000 // 624] * 2
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    advance_words(generator, 10**12)
    assert jumps[2:] == [10**12 // 624]


def test_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    with pytest.raises(ValueError, match="words"):
        advance_words(generator, -1)
    assert torch.equal(generator.get_state(), before)


def test_many_different_counts(step: Step) -> None:
    """More counts than views are kept for."""
    moved, stepped = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for words in range(1, 1500, 2):
        advance_words(moved, words)
    step(stepped, sum(range(1, 1500, 2)))
    assert torch.equal(moved.get_state(), stepped.get_state())


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a dispatch mode")


class _Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a function mode")


@contextmanager
def _default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = [_Dispatched, _Called, FakeTensorMode, _default_device, torch.inference_mode, torch.no_grad, _deterministic]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("words", [1, 1000, 1001, 70_001, 2_600_001])
def test_modes(step: Step, mode: Callable[[], Any], words: int) -> None:
    moved, stepped = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    step(stepped, 2 * words)

    def move() -> None:
        with mode():
            advance_words(moved, words)
        advance_words(moved, words)  # the buffer made under the mode is a plain one

    with ThreadPoolExecutor(1) as pool:  # a new thread has no buffer yet
        pool.submit(move).result()
    assert torch.equal(moved.get_state(), stepped.get_state())


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.functionalize])
@pytest.mark.parametrize("words", [1001, 2_600_001])
def test_transforms(step: Step, transform: Callable[..., Any], words: int) -> None:
    moved, stepped = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    step(stepped, 2 * words)

    def move(x: torch.Tensor) -> torch.Tensor:
        advance_words(moved, words)
        return x.sum()

    result = transform(move)(torch.ones(3))
    assert result.shape == (() if transform is torch.func.functionalize else (3,))
    advance_words(moved, words)
    assert torch.equal(moved.get_state(), stepped.get_state())


def test_in_backward(step: Step) -> None:
    moved, stepped = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)

    class Moves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            advance_words(moved, 999)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            advance_words(moved, 2_600_001)
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Moves.apply(x).sum().backward()
    step(stepped, 2_601_000)
    assert torch.equal(moved.get_state(), stepped.get_state())
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_default_generator(step: Step) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        advance_words(torch.default_generator, 1001)
        drawn = torch.rand(5)
    stepped = torch.Generator().manual_seed(3)
    step(stepped, 1001)
    assert torch.equal(drawn, torch.rand(5, generator=stepped))


def test_threads() -> None:
    def run(i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i % 2)
        for words in (1, 1000, 3001, 70_000, 1_200_000):
            advance_words(generator, words + i % 3)
        return generator.get_state()

    alone = [run(i) for i in range(6)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(24)))
    assert all(torch.equal(state, alone[i % 6]) for i, state in enumerate(together))
