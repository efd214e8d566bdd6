"""Oracles: torch's own kernels step a generator, numpy's MT19937 gives the raw words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch


@pytest.fixture
def step() -> Callable[[torch.Generator, int], None]:
    """Draw and drop words with the kernel of rand, which takes one word for a float."""

    def draw(generator: torch.Generator, words: int) -> None:
        buffer = torch.empty(min(words, 1 << 16))
        while words:
            part = min(words, buffer.numel())
            buffer[:part].uniform_(generator=generator)
            words -= part

    return draw


@pytest.fixture
def numpy_words() -> Callable[[int, int], torch.Tensor]:
    """The first words after a seed of 32 bits, as int64."""

    def words(seed: int, count: int) -> torch.Tensor:
        drawn = np.random.RandomState(seed).randint(0, 2**32, count, dtype=np.uint32)
        return torch.from_numpy(drawn.astype(np.int64))

    return words
