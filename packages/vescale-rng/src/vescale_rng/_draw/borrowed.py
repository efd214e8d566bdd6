"""Keeps the seed and position of another stream in torch's default CPU generator, within a block.

Whatever saves and restores that generator (activation checkpointing, `fork_rng`, checkpoints of a run) then does so
with the stream, and `torch.manual_seed` seeds it. The state looks freshly seeded, but words after the first hold a mark
and the position; the others are those of the seed, so that a draw that passes by this package still is random.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["lend", "look"]

_MASK64 = (1 << 64) - 1
# The state: u64 seed, i32 left, i32 seeded, u64 next, then 624 words of 32 bits in u64 each. Freshly seeded, left is 1
# and next is 0.
_FIRST_WORD = 3


def lend(mark: tuple[int, int], seed: int, position: int) -> None:
    """Write a stream's state into the default generator.

    Args:
        mark: two 32-bit words that tell this kind of stream from others and from a state that torch has made.
        seed: 64 bits, not negative.
        position: 64 bits, not negative.
    """
    state = _seeded(seed).clone()
    words = (*mark, seed & 0xFFFFFFFF, seed >> 32, position & 0xFFFFFFFF, position >> 32)
    state.view(torch.int64)[_FIRST_WORD + 1 : _FIRST_WORD + 1 + len(words)] = torch.tensor(words, device="cpu")
    torch.default_generator.set_state(state)


def look(mark: tuple[int, int], known: tuple[int, int]) -> tuple[int, int]:
    """Seed and position that the default generator holds now.

    Args:
        mark: as given to `lend`.
        known: the last seed and position, which stand if numbers of torch's own have been drawn since.
    """
    seed, left, position, *words = torch.default_generator.get_state()[:80].view(torch.int64).tolist()
    seed &= _MASK64
    if tuple(words[1:3]) == mark:
        return words[3] | words[4] << 32, words[5] | words[6] << 32
    second = (1812433253 * (words[0] ^ words[0] >> 30) + 1) & 0xFFFFFFFF
    fresh = left & 0xFFFFFFFF == 1 and position == 0 and words[1] == second
    return (seed, 0) if fresh or seed != known[0] else known  # fresh: after torch.manual_seed


@functools.lru_cache(maxsize=16)
def _seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()
