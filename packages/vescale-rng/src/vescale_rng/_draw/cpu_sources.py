"""Where the elements of a draw stand in the stream of torch's CPU generator, and how to produce some of them.

Nothing here computes a random number: the generator is moved to where a range begins (`advance_words`) and torch's own
kernel fills that range. Three laws cover the closed forms: a fixed number of words per element, normal numbers in
blocks of 16, and normal numbers in pairs (small or strided tensors), whose second one the generator remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._streams.advance import advance_words
from .._streams.mt19937 import cached_normal, clear_cached_normal

__all__ = ["Blocks", "Even", "Pairs", "run_kernel", "words_taken"]

SEEK = 2000.0
"""A range of its own costs about 5 us, with all that goes on around it: as much as producing so many elements."""
SKIP = 0.6
"""Passing over a word costs 1.3 ns, producing an element about 2 ns."""
BLOCK = 16
"""Elements that torch's normal kernel transforms together."""

_KERNELS: dict[str, Callable[..., Any]] = {
    name: getattr(Tensor, name)
    for name in (
        "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
    )
}  # fmt: skip


def run_kernel(kernel: str, out: Tensor, args: tuple[Any, ...], generator: torch.Generator | None) -> None:
    """Run one of torch's in-place random kernels."""
    _KERNELS[kernel](out, *args, generator=generator)


class _OnGenerator:
    """Common part: a generator and how far it has been moved since the draw began."""

    __slots__ = ("args", "at", "generator", "kernel", "numel")

    grain = 1
    seek_cost = SEEK
    skip_cost = SKIP

    def __init__(self, kernel: str, numel: int, args: tuple[Any, ...], generator: torch.Generator) -> None:
        self.kernel, self.numel, self.args, self.generator = kernel, numel, args, generator
        self.at = 0

    def seek(self, word: int) -> None:
        """Move to `word`, counted from the beginning of the draw."""
        if word != self.at:
            advance_words(self.generator, word - self.at)
            self.at = word


class Even(_OnGenerator):
    """The same number of words for every element: uniform, integers, bernoulli, exponential, cauchy, geometric."""

    __slots__ = ("words",)

    def __init__(self, kernel: str, numel: int, args: tuple[Any, ...], generator: torch.Generator, words: int) -> None:
        super().__init__(kernel, numel, args, generator)
        self.words = words

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Produce a range."""
        self.seek(start * self.words)
        _KERNELS[self.kernel](out, *params, generator=self.generator)
        self.at += out.numel() * self.words

    def words_total(self) -> int:
        """Count the words of the whole draw."""
        return self.numel * self.words

    def finish(self) -> None:
        """Move to the end of the draw."""
        self.seek(self.numel * self.words)


class Blocks(_OnGenerator):
    """`normal_` of at least 16 elements that lie contiguously: blocks of 16, and a tail.

    If the number of elements is no multiple of 16, the last 16 are drawn anew from words after all others (float32,
    float64); in the 16-bit types they are drawn from words right after the full blocks.
    """

    __slots__ = ("full", "ragged", "tail", "tail_word", "words")

    grain = BLOCK
    seek_cost = 5 * SEEK  # runs that do not begin at a block go through a buffer

    def __init__(self, numel: int, args: tuple[Any, ...], generator: torch.Generator, words: int, half: bool) -> None:
        super().__init__("normal_", numel, args, generator)
        self.words = words
        self.full = numel - numel % BLOCK
        self.ragged = numel != self.full
        self.tail_word = (self.full if half else numel) * words
        self.tail: Tensor | None = None

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Produce whole blocks, or whole blocks and the tail."""
        stop = start + out.numel()
        blocks = min(stop, self.full) - start
        if blocks > 0 and not (self.ragged and start >= self.numel - BLOCK):
            self.seek(start * self.words)
            part = out if blocks == out.numel() else out[:blocks]
            _KERNELS["normal_"](part, *params, generator=self.generator)
            self.at += blocks * self.words
        if self.ragged and stop > self.numel - BLOCK:
            tail = self._tail(out, params)
            first = max(start, self.numel - BLOCK)
            out[first - start :].copy_(tail[first - (self.numel - BLOCK) : stop - (self.numel - BLOCK)])

    def _tail(self, like: Tensor, params: tuple[Any, ...]) -> Tensor:
        if self.tail is None:
            self.seek(self.tail_word)
            self.tail = like.new_empty(BLOCK)
            _KERNELS["normal_"](self.tail, *params, generator=self.generator)
            self.at += BLOCK * self.words
        return self.tail

    def words_total(self) -> int:
        """Count the words of the whole draw."""
        return self.tail_word + BLOCK * self.words if self.ragged else self.numel * self.words

    def finish(self) -> None:
        """Move behind the tail."""
        self.seek(self.words_total())


class Pairs(_OnGenerator):
    """Normal numbers one by one: two from 4 words, and the second of a pair waits in the generator.

    `normal_` of fewer than 16 elements or of elements that do not lie contiguously, and `log_normal_` always.
    """

    __slots__ = ("odd_left", "waiting")

    PAIR = 4

    def __init__(self, kernel: str, numel: int, args: tuple[Any, ...], generator: torch.Generator) -> None:
        super().__init__(kernel, numel, args, generator)
        self.waiting = 1 if numel and cached_normal(generator) else 0
        """Elements that come from before the draw."""
        self.odd_left = -1
        """Index of the element whose value waits in the generator; -1 for none."""
        if self.waiting:
            self.odd_left = 0

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Produce a range, from the beginning of the pair that its first element belongs to."""
        if not out.numel():
            return
        extra = 0
        if start != self.odd_left:
            index = start - self.waiting
            extra = index % 2
            self._to_pair(index // 2)
        self._run(out, extra, params)
        stop = start + out.numel()
        pairs = -(-(stop - self.waiting) // 2)
        self.at = self.PAIR * max(0, pairs)
        self.odd_left = stop if (stop - self.waiting) % 2 else -1

    def _to_pair(self, pair: int) -> None:
        self.seek(self.PAIR * pair)
        if self.odd_left >= 0:
            clear_cached_normal(self.generator)
            self.odd_left = -1

    def _run(self, out: Tensor, extra: int, params: tuple[Any, ...]) -> None:
        count = out.numel() + extra
        strided = self.kernel == "normal_" and count >= BLOCK  # a contiguous one would be drawn in blocks
        if not strided and not extra:
            _KERNELS[self.kernel](out, *params, generator=self.generator)
            return
        buffer = out.new_empty(2 * count)[::2] if strided else out.new_empty(count)
        _KERNELS[self.kernel](buffer, *params, generator=self.generator)
        out.copy_(buffer[extra:])

    def words_total(self) -> int:
        """Count the words of the whole draw."""
        return self.PAIR * -(-(self.numel - self.waiting) // 2)

    def finish(self) -> None:
        """Move behind the last pair, and let its second number wait if the draw has not used it."""
        index = self.numel - self.waiting
        if not self.numel or (self.odd_left == self.numel and index % 2):
            return
        if index % 2:
            self._to_pair(index // 2)
            torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=self.generator)
            self.at += self.PAIR
        else:
            self._to_pair(index // 2)


def words_taken(kernel: str, dtype: torch.dtype, args: tuple[Any, ...]) -> int:
    """Words that a kernel takes per element, found by running it on one element.

    Args:
        kernel: one with the same number of words for every element.
        dtype: of the tensor that is filled.
        args: arguments of the kernel; of a tensor only its dtype matters.
    """
    probe = torch.Generator().manual_seed(0)
    given = tuple(a.new_full((1,), 0.5) if isinstance(a, Tensor) else a for a in args)
    run_kernel(kernel, torch.empty(1, dtype=dtype, device="cpu"), given, probe)
    return int(probe.get_state()[16:24].view(torch.int64))  # the field `next`, 0 at the start
