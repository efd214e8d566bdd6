"""Jump a CPU generator ahead by whole blocks of 624 words, in a time that hardly depends on how many.

Every word of mt19937 is linear over GF(2) in the words before it, so word J of the stream is the sum of the words at
the set bits of x^J mod phi, phi being the characteristic polynomial. Polynomials are Python ints, torch's own kernel
makes the words, and since tempering is linear too, tempered words are summed and tempering is undone once.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict

import torch
from torch import Tensor

from .modes import plain_torch
from .mt19937 import BLOCK_WORDS, Mt19937State

__all__ = ["Polynomials", "jump_blocks", "polynomials", "power_of_x"]

DEGREE = 19937
_MATRIX = 0x9908B0DF


def _characteristic() -> int:
    """Characteristic polynomial of mt19937.

    It is t b^32 + sum_i a_i t b^(31-i) + a_31 with b = t^623 + t^396, i from 0 to 30 and a_i bit i of the matrix.

    Source: Matsumoto and Nishimura, "Mersenne Twister" (ACM TOMACS 8, 1998), section 3.
    """
    powers = [1]
    for _ in range(32):
        powers.append((powers[-1] << 623) ^ (powers[-1] << 396))
    result = (powers[32] << 1) ^ (_MATRIX >> 31)
    for i in range(31):
        if _MATRIX >> i & 1:
            result ^= powers[31 - i] << 1
    return result


PHI = _characteristic()
_BELOW = tuple(e for e in range(DEGREE) if PHI >> e & 1)
# With y = 1/x, phi = x^DEGREE * f(y), and f = 1 + y^623(...). Squaring doubles exponents over GF(2), so f^32 is 1 up to
# y^19936, as many terms as the quotient of a square has: 1/f = f^31 = f f^2 f^4 f^8 f^16, each of them sparse.
_INVERSE = tuple(tuple((DEGREE - e) << k for e in reversed(_BELOW) if (DEGREE - e) << k < DEGREE - 1) for k in range(5))
_MASK = (1 << DEGREE) - 1
_BYTES = (DEGREE + 7) // 8
# Squaring moves bit i to bit 2i: a byte becomes two, one for each half of it.
_LOW = bytes(sum((byte >> bit & 1) << 2 * bit for bit in range(4)) for byte in range(256))
_HIGH = bytes(_LOW[byte >> 4] for byte in range(256))


def _square(p: int) -> int:
    """p^2 mod phi; p has a degree below DEGREE."""
    data = p.to_bytes(_BYTES, "little")
    spread = bytearray(2 * _BYTES)
    spread[0::2] = data.translate(_LOW)
    spread[1::2] = data.translate(_HIGH)
    p = int.from_bytes(spread, "little")
    quotient = p >> DEGREE
    for shifts in _INVERSE:
        total = quotient
        for shift in shifts:
            total ^= quotient >> shift
        quotient = total
    for shift in _BELOW:
        p ^= quotient << shift
    return p & _MASK


def power_of_x(exponent: int) -> int:
    """x^exponent mod phi over GF(2), as an int whose bit i is the coefficient of x^i.

    0.2 ms per bit of the exponent beyond 14: 3 ms for 10^9, measured on one core of an AMD EPYC.
    """
    # The first bits are free: powers below the degree need no reduction.
    rest = max(0, exponent.bit_length() - 14)
    p = 1 << (exponent >> rest)
    for bit in reversed(range(rest)):
        p = _square(p)
        if exponent >> bit & 1:
            p <<= 1
            if p >> DEGREE:
                p ^= PHI
    return p


class Polynomials:
    """Polynomials of recent jumps, 2.6 KB each; threads may share it.

    Args:
        limit: how many to keep.
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._known: OrderedDict[int, int | None] = OrderedDict()
        self._lock = threading.Lock()

    def _put(self, blocks: int, p: int | None) -> None:
        self._known[blocks] = p
        self._known.move_to_end(blocks)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def worth(self, blocks: int) -> bool:
        """Whether a jump this long was asked about before; it is remembered, so the second time the answer is yes.

        Shapes repeat from step to step: what comes twice will come often.
        """
        with self._lock:
            if blocks in self._known:
                return True
            self._put(blocks, None)
            return False

    def get(self, blocks: int) -> int:
        """x^(624 (blocks - 1)) mod phi; see `jump_blocks` for why one less."""
        with self._lock:
            p = self._known.get(blocks)
            if p is not None:
                self._known.move_to_end(blocks)
                return p
        p = power_of_x(BLOCK_WORDS * (blocks - 1))  # milliseconds: not under the lock
        with self._lock:
            self._put(blocks, p)
        return p


polynomials = Polynomials()
"""Shared by all generators of the process: a polynomial depends on the length of the jump only."""


# A polynomial is read four bits at a time. For each of their 16 values a table holds the sum of the words that they
# select, for every place in the sequence; a window of 624 words of it is then one term of the sum.
_NIBBLES = (DEGREE + 3) // 4
_SPAN = 4 * (_NIBBLES - 1) + BLOCK_WORDS
_SOURCE_BLOCKS = (_SPAN + 3 + BLOCK_WORDS - 1) // BLOCK_WORDS
_WINDOWS = (16 * _SPAN - BLOCK_WORDS) // 4 + 1
# Windows added at a time, as pairs of words: 156 KiB, which stays in cache, and 20 k elements. Operators of more than
# 32 k elements would be split over the threads of torch; where cores are shared, waiting for them exceeds the work.
_ROWS = 64


def _next_words(state: Mt19937State, blocks: int) -> Tensor:
    """The tempered words of the next `blocks` blocks, int32; `state` stands at the end of a block."""
    generator = torch.Generator()
    state.restore(generator)
    raw = torch.empty(blocks * BLOCK_WORDS // 2, dtype=torch.int64, device="cpu")
    raw.random_(-(2**63), None, generator=generator)  # all 64 bits: the first word is the high half
    return torch.stack((raw >> 32, raw), 1).to(torch.int32).flatten()


def _sum_of_words(p: int, words: Tensor) -> Tensor:
    """Sum over the set bits i of p of words[i : i + 624], int32."""
    table = torch.empty(16, _SPAN, dtype=torch.int32, device="cpu")
    table[0].zero_()
    for nibble in range(1, 16):
        bit = nibble.bit_length() - 1
        torch.bitwise_xor(table[nibble - (1 << bit)], words[bit : bit + _SPAN], out=table[nibble])
    windows = table.view(torch.int64).view(-1).as_strided((_WINDOWS, BLOCK_WORDS // 2), (2, 1))
    data = torch.frombuffer(bytearray(p.to_bytes(_BYTES, "little")), dtype=torch.uint8)
    nibbles = torch.stack((data & 15, data >> 4), 1).flatten()
    places = nibbles.nonzero().squeeze(1)
    rows = nibbles[places].to(torch.int64).mul_(_SPAN // 4).add_(places)
    total = torch.zeros(_ROWS, BLOCK_WORDS // 2, dtype=torch.int64, device="cpu")
    for part in torch.split(rows, _ROWS):
        total[: part.numel()].bitwise_xor_(windows.index_select(0, part))
    count = _ROWS
    while count > 1:
        count //= 2
        total[:count].bitwise_xor_(total[count : 2 * count])
    return total[0].view(torch.int32)


def _untemper(words: Tensor) -> Tensor:
    """State words of tempered words; int64 values in [0, 2**32)."""
    y = words.to(torch.int64) & 0xFFFFFFFF
    y = y ^ (y >> 18)
    y = y ^ ((y << 15) & 0xEFC60000)
    tempered = y
    for _ in range(4):  # each pass gets seven more bits right
        y = tempered ^ ((y << 7) & 0x9D2C5680)
    return y ^ (y >> 11) ^ (y >> 22)


def jump_blocks(generator: torch.Generator, blocks: int) -> None:
    """Move a CPU generator `blocks` blocks of 624 words ahead; its place within the block stays.

    The state is the one that drawing would have left, in every byte. A generator that was seeded and not used ends as
    if all words of a block had been drawn. A cached normal number stays.

    Args:
        generator: of the CPU.
        blocks: how many, >= 1; 0 leaves the generator untouched.

    Raises:
        ValueError: `blocks` is negative.
        RandomError: the generator's state has an unknown layout.
    """
    if blocks < 0:
        raise ValueError(f"blocks: expected at least 0, got {blocks}; a generator cannot be moved back")
    if blocks == 0:
        return
    state = Mt19937State.of(generator)
    used = state.used or BLOCK_WORDS
    state.used = BLOCK_WORDS
    # 31 bits of the first word of a block take no part in the recurrence, and in a seeded state they are arbitrary. The
    # next block is made by the recurrence in all bits, so the sum starts there and has one block less to go.
    p = polynomials.get(blocks)
    with plain_torch():
        key = _untemper(_sum_of_words(p, _next_words(state, _SOURCE_BLOCKS)))
        state.key_bytes = ctypes.string_at(key.data_ptr(), key.nbytes)
    state.used = used
    state.restore(generator)
