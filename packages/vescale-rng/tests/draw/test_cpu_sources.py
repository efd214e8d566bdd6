"""Sources of the CPU stream, element ranges against torch's own kernels and raw words against numpy's MT19937."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng._draw.cpu_sources import BLOCK, Blocks, Even, Pairs, run_kernel, words_taken
from vescale_rng._streams.mt19937 import cached_normal

MAKERS: dict[str, Callable[[int, torch.Generator], Any]] = {
    "uniform of floats": lambda n, g: Even("uniform_", n, (), g, 1),
    "exponential": lambda n, g: Even("exponential_", n, (1.0,), g, 2),
    "blocks of floats": lambda n, g: Blocks(n, (), g, 1, half=False),
    "blocks of doubles": lambda n, g: Blocks(n, (0.5, 2.0), g, 2, half=False),
    "blocks of halves": lambda n, g: Blocks(n, (), g, 1, half=True),
    "pairs": lambda n, g: Pairs("normal_", n, (), g),
    "pairs of log-normals": lambda n, g: Pairs("log_normal_", n, (0.0, 0.5), g),
}
DTYPES = {"blocks of doubles": torch.float64, "blocks of halves": torch.bfloat16, "exponential": torch.float64}


def started(seed: int, words: int, waiting: bool) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words, dtype=torch.int32).random_(generator=generator)
    if waiting:
        torch.empty(1).normal_(generator=generator)
    return generator


def one_device(kind: str, numel: int, generator: torch.Generator) -> torch.Tensor:
    """The same draw by torch alone."""
    dtype = DTYPES.get(kind, torch.float32)
    out = torch.empty(numel, dtype=dtype)
    if kind == "pairs":
        out = torch.empty(2 * numel, dtype=dtype)[::2]
    if "blocks" in kind or kind == "pairs":
        return out.normal_(*((0.5, 2.0) if "doubles" in kind else ()), generator=generator)
    if kind == "pairs of log-normals":
        return out.log_normal_(0.0, 0.5, generator=generator)
    return out.uniform_(generator=generator) if "uniform" in kind else out.exponential_(1.0, generator=generator)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(list(MAKERS)),
    numel=st.integers(0, 150),
    words=st.sampled_from([0, 3, 620, 624, 1000]),
    waiting=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_ranges_equal_one_device(kind: str, numel: int, words: int, waiting: bool, seed: int) -> None:
    if "blocks" in kind:
        numel += BLOCK  # torch draws fewer in pairs
    rng = random.Random(seed)
    generator, other = started(seed, words, waiting), started(seed, words, waiting)
    expected = one_device(kind, numel, other)
    source = MAKERS[kind](numel, generator)
    ends = sorted(rng.sample(range(0, numel + 1, source.grain), min(4, numel // source.grain + 1)))
    if rng.random() < 0.5 and numel:
        ends = [*ends[:3], numel]
    for start, stop in itertools.pairwise(ends):
        if start < stop and rng.random() < 0.7:
            out = torch.empty(stop - start, dtype=expected.dtype)
            source.emit(out, start, source.args)
            assert torch.equal(out, expected[start:stop])
    source.finish()
    assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("numel", [16, 17, 31, 32, 623, 624, 1248])
@pytest.mark.parametrize("waiting", [False, True])
def test_words_of_a_whole_draw(kind: str, numel: int, waiting: bool) -> None:
    """numpy steps so many words and is where torch is after the draw."""
    generator = started(5, 10, waiting)
    total = MAKERS[kind](numel, generator).words_total()
    before = generator.get_state()
    one_device(kind, numel, generator)
    stepper = np.random.MT19937()
    stepper.state = numpy_state(before)
    stepper.random_raw(total, output=False)
    after = np.random.MT19937()
    after.state = numpy_state(generator.get_state())
    assert (stepper.random_raw(700) == after.random_raw(700)).all()
    other = torch.Generator()
    other.set_state(before)
    MAKERS[kind](numel, other).finish()
    assert torch.equal(other.get_state(), generator.get_state())


def numpy_state(state: torch.Tensor) -> dict[str, Any]:
    """The state of a CPU generator as numpy writes it."""
    key = state[24:5016].view(torch.int64).numpy().astype(np.uint32)
    left, following = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
    return {"bit_generator": "MT19937", "state": {"key": key, "pos": 624 if left == 1 else following}}


def test_a_uniform_float_is_24_bits_of_a_word() -> None:
    """The unit in which positions are counted, seen from numpy."""
    generator = torch.Generator().manual_seed(42)
    out = torch.empty(1000)
    Even("uniform_", 10_000, (), generator, 1).emit(out, 5000, ())
    raw = np.random.RandomState(42).randint(0, 2**32, 6000, dtype=np.uint32)[5000:]
    assert out.tolist() == ((raw & 0xFFFFFF) * 2.0**-24).tolist()


@pytest.mark.parametrize(
    ("kernel", "dtype", "args", "words"),
    [
        ("uniform_", torch.float32, (), 1),
        ("uniform_", torch.bfloat16, (), 1),
        ("uniform_", torch.float64, (), 2),
        ("bernoulli_", torch.bool, (0.5,), 2),
        ("bernoulli_", torch.float32, (0.0,), 2),
        ("bernoulli_", torch.float64, (torch.empty(7),), 1),
        ("bernoulli_", torch.float32, (torch.empty(7, dtype=torch.float64),), 2),
        ("bernoulli_", torch.int64, (torch.empty(7, dtype=torch.float16),), 1),
        ("random_", torch.int64, (), 2),
        ("random_", torch.int32, (), 1),
        ("random_", torch.float64, (), 2),
        ("random_", torch.bool, (), 1),
        ("random_", torch.int64, (-(2**63), None), 2),
        ("random_", torch.int64, (0, 2**28 - 1), 1),
        ("random_", torch.int64, (0, 2**28), 2),
        ("random_", torch.int32, (-(2**27), 2**27), 2),
        ("random_", torch.uint32, (0, 2**28 + 1), 2),
        ("exponential_", torch.float32, (), 2),
        ("cauchy_", torch.bfloat16, (), 2),
        ("geometric_", torch.uint8, (0.5,), 2),
    ],
)
def test_words_per_element(kernel: str, dtype: torch.dtype, args: tuple[Any, ...], words: int) -> None:
    """The table of draws that was verified for torch 2.13."""
    assert words_taken(kernel, dtype, args) == words


def test_kernels_that_the_default_generator_runs() -> None:
    torch.manual_seed(6)
    expected = torch.rand(5)
    torch.manual_seed(6)
    out = torch.empty(5)
    run_kernel("uniform_", out, (), None)
    assert torch.equal(out, expected)


def test_the_waiting_normal_is_first_and_the_last_one_waits() -> None:
    generator = started(1, 0, waiting=True)
    source = Pairs("normal_", 4, (), generator)
    assert source.words_total() == 8  # 1 waits, 3 make two pairs
    source.finish()
    assert cached_normal(generator)
    empty = Pairs("normal_", 0, (), generator)
    before = generator.get_state()
    empty.finish()
    assert torch.equal(generator.get_state(), before)
