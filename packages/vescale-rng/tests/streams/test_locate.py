"""Finding the position of a CPU generator from its state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng._streams import locate
from vescale_rng._streams.advance import advance_words
from vescale_rng._streams.locate import words_since_seed
from vescale_rng._streams.mt19937 import Mt19937State
from vescale_rng.errors import RandomError

Step = Callable[[torch.Generator, int], None]


@pytest.mark.parametrize("seed", [0, -1, 2**32 + 5])
@pytest.mark.parametrize("words", [0, 1, 623, 624, 625, 1248, 1249, 624 * 256, 624 * 256 + 1, 1_000_003])
def test_words_drawn_with_torch(step: Step, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    step(generator, words)
    before = generator.get_state()
    assert words_since_seed(generator, words) == words
    assert torch.equal(generator.get_state(), before)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 2**32))
def test_any_position(words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    advance_words(generator, words)
    assert words_since_seed(generator, 10**9) == words


def test_every_block_of_the_first_stages() -> None:
    generator = torch.Generator().manual_seed(1)
    for block in range(5, 700, 11):
        generator.manual_seed(1)
        advance_words(generator, 624 * block)
        assert words_since_seed(generator, 10**6) == 624 * block


@pytest.mark.parametrize("words", [1, 624, 625, 1_000_000])
def test_limit_is_exact(words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    advance_words(generator, words)
    assert words_since_seed(generator, words) == words
    with pytest.raises(RandomError, match=f"{words - 1} words after its seed 0"):
        words_since_seed(generator, words - 1)


def test_state_of_another_seed(step: Step) -> None:
    generator = torch.Generator().manual_seed(0)
    for words in (0, 5, 2000):
        generator.manual_seed(0)
        step(generator, words)
        state = generator.get_state()
        state[:8] = torch.tensor([9, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)
        generator.set_state(state)
        with pytest.raises(RandomError, match="seed 9"):
            words_since_seed(generator, 10**7)


def test_blocks_with_the_same_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks only propose a block; the whole key decides."""

    def same(generator: torch.Generator, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    monkeypatch.setattr(locate, "_marks", same)
    generator = torch.Generator().manual_seed(1)
    advance_words(generator, 624 * 250 + 3)
    assert words_since_seed(generator, 624 * 300) == 624 * 250 + 3


def test_a_cached_normal_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    assert Mt19937State.of(generator).cached_normal is not None
    assert words_since_seed(generator, 100) == 8
