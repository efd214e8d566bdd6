"""Find where a CPU generator stands, by meeting in the middle between its seed and its state.

The engine does not count, but its state holds the seed. Small steps on from the state (made by torch's kernel) and wide
jumps from the seed meet at a block that both pass, so a stream of n words is searched in about sqrt(n) steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import RandomError
from .advance import advance_words
from .jump import jump_blocks
from .modes import plain_torch
from .mt19937 import BLOCK_WORDS, Mt19937State

__all__ = ["words_since_seed"]

_FIRST_STEPS = 1 << 8
_GROWTH = 4
_STEPS_PER_JUMP = 1 << 10  # a jump costs as much as one to two thousand steps
_CHUNK = 256
_PAIRS = BLOCK_WORDS // 2


def _marks(generator: torch.Generator, count: int) -> Tensor:
    """A mark of each of the next `count` blocks, int64: its first words. `generator` stands at the end of a block."""
    marks = torch.empty(count, dtype=torch.int64, device="cpu")
    buffer = torch.empty(min(count, _CHUNK) * _PAIRS, dtype=torch.int64, device="cpu")
    for start in range(0, count, _CHUNK):
        part = marks[start : start + _CHUNK]
        drawn = buffer[: part.numel() * _PAIRS]
        drawn.random_(generator=generator)
        part.copy_(drawn[::_PAIRS])
    return marks


def _copy(generator: torch.Generator) -> torch.Generator:
    other = torch.Generator()
    other.set_state(generator.get_state())
    return other


def _seeded(seed: int, blocks: int) -> torch.Generator:
    """A generator at the end of the `blocks`-th block after `seed`."""
    generator = torch.Generator().manual_seed(seed)
    jump_blocks(generator, blocks)
    return generator


def _blocks_since_seed(state: Mt19937State, limit: int) -> int | None:
    """Number of the block of `state`, counted from its seed, if it is at most `limit`."""
    target = torch.Generator()
    state.restore(target)
    advance_words(target, BLOCK_WORDS - state.used)
    steps, done = _FIRST_STEPS, 0
    while done < limit:
        marks = _marks(_copy(target), steps)
        done -= done % steps
        wide = _seeded(state.seed, done)
        for _ in range(max(1, steps // _STEPS_PER_JUMP)):
            jump_blocks(wide, steps)
            done += steps
            for ahead in (marks == _marks(_copy(wide), 1)).nonzero().flatten().tolist():
                found: int = done - ahead
                # Two blocks may have the same mark.
                if found <= limit and Mt19937State.of(_seeded(state.seed, found)).key_bytes == state.key_bytes:
                    return found
            if done >= limit:
                break
        steps *= _GROWTH
    return None


def words_since_seed(generator: torch.Generator, search_limit: int) -> int:
    """32-bit words drawn from a CPU generator since it was seeded.

    Args:
        generator: of the CPU; it is not changed.
        search_limit: most words to look for. 10^8 take 0.05 s, 10^11 two seconds.

    Raises:
        RandomError: the state is not found within `search_limit` words of its seed.
    """
    state = Mt19937State.of(generator)
    with plain_torch():
        if state.fresh:
            seeded = Mt19937State.of(torch.Generator().manual_seed(state.seed))
            if seeded.key_bytes == state.key_bytes:
                return 0
        else:
            # The first word of block b is word 624 (b - 1) of the stream.
            blocks = _blocks_since_seed(state, (search_limit - state.used) // BLOCK_WORDS + 1)
            if blocks is not None:
                return BLOCK_WORDS * (blocks - 1) + state.used
    raise RandomError(
        f"generator: its state is not among the {search_limit} words after its seed {state.seed}, so it has no "
        "position; it was put together by hand or drew more: raise search_limit, or keep the state (get_state) instead"
    )
