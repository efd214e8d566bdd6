"""Move a CPU generator past a number of words, as fast as can be: by drawing and dropping them, or by a jump.

Few words are dropped by torch's cheapest kernel into a buffer that is kept, many are jumped over; where one becomes
cheaper than the other was measured.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .jump import jump_blocks, polynomials
from .modes import modes_active, plain_torch
from .mt19937 import BLOCK_WORDS

__all__ = ["advance_words"]

# Measured on one core of an AMD EPYC with torch 2.13: dropping takes 1.5 ns a word; a jump 1.7 ms, and 0.2 ms more for
# every bit of the count beyond 14 if its polynomial must be computed. That is 1.1 M words if it is known, 2.3 M if not.
_JUMP_KNOWN = 1_250_000
_JUMP_NEW = 2_500_000
_CHUNK = 1 << 15
"""Elements of the buffer, int64 (256 KiB, in cache). `random_` takes two words for each, at the least cost per word."""
_SINGLE = 1024
"""Up to here an odd count is dropped one word at a time: cheaper than a second call."""
_KEPT = 256


class _Scratch(threading.local):
    """Buffers of one thread, and views of them for the counts that came lately."""

    def __init__(self) -> None:
        with plain_torch():
            self.buffer = torch.empty(_CHUNK, dtype=torch.int64, device="cpu")
            self.words = self.buffer.view(torch.int32)
        self.views: dict[int, tuple[Tensor, ...]] = {}

    def add(self, count: int) -> tuple[Tensor, ...]:
        """Views that together take `count` words, 1 to 2 * _CHUNK."""
        views: tuple[Tensor, ...]
        if count % 2 == 0:
            views = (self.buffer[: count // 2],)
        elif count < _SINGLE:
            views = (self.words[:count],)
        else:
            views = (self.buffer[: count // 2], self.words[:1])
        if len(self.views) >= _KEPT:
            self.views.clear()
        self.views[count] = views
        return views


_scratch = _Scratch()


def _drop(generator: torch.Generator, count: int) -> None:
    while count > 0:
        part = min(count, 2 * _CHUNK)
        for view in _scratch.views.get(part) or _scratch.add(part):
            view.random_(generator=generator)
        count -= part


def advance_words(generator: torch.Generator, words: int) -> None:
    """Leave a CPU generator exactly as if `words` raw 32-bit numbers had been drawn from it.

    Args:
        generator: of the CPU; a normal number that waits in it stays.
        words: how many, >= 0; 0 leaves the generator untouched.

    Raises:
        ValueError: `words` is negative.

    >>> one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    >>> _ = torch.rand(1000, generator=one)  # a float takes one word
    >>> advance_words(other, 1000)
    >>> torch.equal(one.get_state(), other.get_state())
    True
    """
    if words <= 0:
        if words < 0:
            raise ValueError(f"words: expected at least 0, got {words}; a generator cannot be moved back")
        return
    if words >= _JUMP_KNOWN:
        blocks = words // BLOCK_WORDS
        if polynomials.worth(blocks) or words >= _JUMP_NEW:
            jump_blocks(generator, blocks)
            words -= blocks * BLOCK_WORDS
    if modes_active():
        with plain_torch():
            _drop(generator, words)
    else:
        _drop(generator, words)
