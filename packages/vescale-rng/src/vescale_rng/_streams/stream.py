"""`Stream`: a generator seen as a sequence of 32-bit words with a position in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._integers import integer
from ..errors import RandomError
from .advance import advance_words
from .locate import words_since_seed
from .modes import plain_torch
from .mt19937 import cached_normal

__all__ = ["Stream"]

_MASK32 = 0xFFFFFFFF
_BLOCK = 4
"""Words in a block of Philox; offsets of CUDA generators are multiples of it."""


class Stream:
    """A generator as a sequence of 32-bit words.

    On the CPU (mt19937) all random operators take words from one sequence; the position says how much of it was used.
    On CUDA (Philox) every thread of a kernel has a sequence of its own, and the position is the offset, in words, at
    which all of them go on. A stream is a view: it holds nothing but the generator, which others may use in between.

    Args:
        generator: a CPU generator, or one with ``initial_seed``, ``get_offset`` and ``set_offset`` (CUDA and other
            accelerators, also the emulated one); None: torch's default CPU generator. Within `portable` and
            `emulate_cuda` that one holds the block's state, and is no stream of words.
        search_limit: on the CPU, how many words after the seed `position` looks for the state.

    Raises:
        TypeError: `generator` is neither; that of `portable` counts calls, not words.
        RandomError: from the properties and methods, if they are asked for the default generator within a block.

    >>> generator = torch.Generator().manual_seed(1)
    >>> stream = Stream(generator)
    >>> ahead = stream.peek(3)
    >>> u = torch.rand(3, generator=generator)  # a float takes the low 24 bits of one word
    >>> torch.equal(u, (ahead & 0xFFFFFF) / 2**24), stream.position
    (True, 3)
    """

    __slots__ = ("_counted", "generator", "search_limit")

    def __init__(self, generator: torch.Generator | Any = None, *, search_limit: int = 10**11) -> None:
        self.generator = torch.default_generator if generator is None else generator
        self.search_limit = search_limit
        if isinstance(self.generator, torch.Generator):
            self._counted = self.generator.device.type != "cpu"
        else:
            self._counted = True
            needed = ("initial_seed", "get_offset", "set_offset")
            if isinstance(generator, type) or not all(hasattr(generator, name) for name in needed):
                hint = "; it counts calls: see its counter" if hasattr(generator, "counter") else ""
                raise TypeError(
                    f"generator: expected a torch.Generator, or one with {', '.join(needed)}, got {generator!r}{hint}"
                )

    @property
    def seed(self) -> int:
        """The seed, in [0, 2**64); negative seeds wrap."""
        return int(self.generator.initial_seed()) % 2**64

    @property
    def position(self) -> int:
        """Words drawn since seeding; on accelerators the generator's offset.

        On the CPU it is searched for (see `words_since_seed`): under 0.1 s for 10^8 words, seconds for 10^11.

        Raises:
            RandomError: on the CPU, the state is not found within `search_limit` words of the seed.
        """
        if self._counted:
            return int(self.generator.get_offset())
        self._refuse_borrowed()
        return words_since_seed(self.generator, self.search_limit)

    @property
    def waiting(self) -> bool:
        """Whether a CPU generator holds the second normal number of a pair, which the next odd draw takes.

        Never on accelerators.
        """
        if self._counted:
            return False
        self._refuse_borrowed()
        return cached_normal(self.generator)

    def jump(self, words: int) -> None:
        """Move on by `words` words without drawing them; a normal number that waits in a CPU generator stays.

        Args:
            words: how many; on the CPU >= 0, on accelerators a multiple of 4, and negative to move back.

        Raises:
            ValueError: `words` is none of these, or leads before the beginning of the stream.
            TypeError: `words` is no integer.
        """
        words = integer("words", words)
        if not self._counted:
            self._refuse_borrowed()
            advance_words(self.generator, words)
            return
        offset = int(self.generator.get_offset()) + words
        if words % _BLOCK or offset < 0:
            raise ValueError(
                f"words: expected a multiple of {_BLOCK} that keeps the offset at 0 or more, got {words} at offset "
                f"{offset - words}"
            )
        self.generator.set_offset(offset)

    def peek(self, words: int, *, subsequence: int = 0) -> Tensor:
        """The next words; the generator does not move.

        Args:
            words: how many, >= 0.
            subsequence: on accelerators, the thread whose sequence is meant; 0 on the CPU.

        Returns:
            int64 (words,) on the CPU, values in [0, 2**32).

        Raises:
            ValueError: `words` is negative, or `subsequence` is not 0 on the CPU.
            TypeError: one of them is no integer.
        """
        words, subsequence = integer("words", words), integer("subsequence", subsequence)
        if words < 0:
            raise ValueError(f"words: expected at least 0, got {words}")
        if self._counted:
            from .._cuda.philox import philox_words  # only for accelerators

            offset = int(self.generator.get_offset())
            with plain_torch():
                first, skipped = divmod(offset, _BLOCK)
                counters = torch.arange(first, first + (words + skipped + _BLOCK - 1) // _BLOCK, device="cpu")
                drawn = torch.stack(philox_words(self.seed, subsequence, counters), 1)
                return drawn.flatten()[skipped : skipped + words].clone()
        if subsequence:
            raise ValueError(f"subsequence: a CPU generator has one sequence, 0; got {subsequence}")
        self._refuse_borrowed()
        copy = torch.Generator()
        copy.set_state(self.generator.get_state())
        with plain_torch():
            raw = torch.empty((words + 1) // 2, dtype=torch.int64, device="cpu")
            raw.random_(-(2**63), None, generator=copy)  # all 64 bits: the first word is the high half
            return (torch.stack((raw >> 32, raw), 1) & _MASK32).flatten()[:words].clone()

    def __repr__(self) -> str:
        where = f", offset={self.generator.get_offset()}" if self._counted else ""
        device = getattr(self.generator, "device", None)
        kind = f"device={str(device)!r}" if device is not None else type(self.generator).__name__
        return f"Stream({kind}, seed={self.seed}{where})"

    def _refuse_borrowed(self) -> None:
        from .._draw.borrowed import block_name  # it finds states by this package
        from .._draw.mode import is_default

        name = block_name()
        if name is not None and is_default(self.generator):
            raise RandomError(
                f"Stream: within {name}() torch's default generator holds the state of the block, which is no sequence "
                f"of words; ask what {name}() gave (its counter or offset), or leave the block"
            )
