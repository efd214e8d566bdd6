"""The 5056-byte state of torch's CPU generator, read and written in place.

The bytes are reached through the address of the state tensor: no tensor operator runs, so no mode can fake it, and
asking whether a normal number waits in a generator costs a microsecond.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import RandomError

__all__ = [
    "BLOCK_WORDS",
    "Mt19937State",
    "cached_normal",
    "cached_normal_value",
    "clear_cached_normal",
    "set_cached_normal",
]

BLOCK_WORDS = 624
"""Words that the engine makes at a time; the recurrence turns one such block into the next."""

_BYTES = 5056
# In native byte order, as torch writes the struct: see THGeneratorState in ATen/CPUGeneratorImpl.cpp.
_SEED = struct.Struct("=Q")
_LEFT, _SEEDED, _NEXT, _KEY = 8, 12, 16, 24
_NORMAL, _NORMAL_VALID = 5024, 5040
_INT, _LONG, _DOUBLE = struct.Struct("=i"), struct.Struct("=Q"), struct.Struct("=d")
_WORDS = struct.Struct(f"={BLOCK_WORDS}Q")
_BUFFER = ctypes.c_char * _BYTES
_unseen = torch._C.DisableTorchFunction  # function modes see even the attributes of a tensor


class Mt19937State:
    """The state of a CPU generator; changes are written through to the tensor that it was made from.

    Args:
        state: what ``generator.get_state()`` returned, uint8 (5056,), on the CPU. It is not copied.

    Raises:
        RandomError: `state` is not a state of torch's CPU generator.

    >>> generator = torch.Generator().manual_seed(7)
    >>> _ = torch.rand(5, generator=generator)
    >>> state = Mt19937State.of(generator)
    >>> state.seed, state.used, state.cached_normal
    (7, 5, None)
    """

    __slots__ = ("_view", "tensor")

    def __init__(self, state: Tensor) -> None:
        with _unseen():
            self._view = self._bytes_of(state)
        self.tensor = state
        seeded, left, following = self._int(_SEEDED), self.left, self.next
        if seeded != 1 or not 1 <= left <= BLOCK_WORDS or not (left + following == 625 or (left, following) == (1, 0)):
            raise RandomError(
                f"state: not a state of torch's CPU generator (seeded={seeded}, left={left}, next={following}); take "
                "it from get_state() of a generator that was seeded"
            )

    @staticmethod
    def _bytes_of(state: Tensor) -> memoryview:
        if state.dtype != torch.uint8 or state.device.type != "cpu" or not state.is_contiguous():
            raise RandomError(
                f"state: expected a contiguous uint8 tensor on the CPU, as get_state() of a CPU generator returns, got "
                f"{state.dtype} on {state.device}"
            )
        if state.numel() != _BYTES:
            raise RandomError(
                f"state: expected the {_BYTES} bytes of a CPU generator's state, got {state.numel()}; states of other "
                "devices and of unknown torch versions have another layout"
            )
        # The view does not keep the memory alive; the tensor that is kept beside it does.
        return memoryview(_BUFFER.from_address(state.data_ptr())).cast("B")

    @classmethod
    def of(cls, generator: torch.Generator) -> Mt19937State:
        """A copy of the state that `generator` (on the CPU) is in now."""
        return cls(generator.get_state())

    def restore(self, generator: torch.Generator) -> None:
        """Put `generator` (on the CPU) into this state."""
        generator.set_state(self.tensor)

    def clone(self) -> Mt19937State:
        """An independent copy."""
        other = torch.Generator()
        other.set_state(self.tensor)
        return Mt19937State(other.get_state())

    def _int(self, at: int) -> int:
        return int(_INT.unpack_from(self._view, at)[0])

    @property
    def seed(self) -> int:
        """The seed as stored, in [0, 2**64); the engine was seeded with its low 32 bits."""
        return int(_SEED.unpack_from(self._view, 0)[0])

    @property
    def left(self) -> int:
        """One more than the words that are left in the block; at 1 the next draw makes a new block."""
        return self._int(_LEFT)

    @property
    def next(self) -> int:
        """Index of the next word in the block; 0 only in a generator that was seeded and not used."""
        return int(_LONG.unpack_from(self._view, _NEXT)[0])

    @property
    def fresh(self) -> bool:
        """Whether nothing was drawn since seeding: the block is then the seed itself, no word of which is given out."""
        return self.next == 0

    @property
    def used(self) -> int:
        """Words given out of the block, 1 to 624; 0 when fresh."""
        return self.next

    @used.setter
    def used(self, words: int) -> None:
        if not 1 <= words <= BLOCK_WORDS:
            raise ValueError(f"used: expected 1 to {BLOCK_WORDS} words, got {words}")
        _INT.pack_into(self._view, _LEFT, BLOCK_WORDS + 1 - words)
        _LONG.pack_into(self._view, _NEXT, words)

    @property
    def key(self) -> tuple[int, ...]:
        """The 624 words of the block before tempering, each in [0, 2**32)."""
        return _WORDS.unpack_from(self._view, _KEY)

    @key.setter
    def key(self, words: Sequence[int]) -> None:
        if len(words) != BLOCK_WORDS:
            raise ValueError(f"key: expected {BLOCK_WORDS} words, got {len(words)}")
        _WORDS.pack_into(self._view, _KEY, *words)

    @property
    def key_bytes(self) -> bytes:
        """The block as the state holds it: 624 unsigned 64-bit numbers; quicker to compare than `key`."""
        return bytes(self._view[_KEY : _KEY + _WORDS.size])

    @key_bytes.setter
    def key_bytes(self, data: bytes) -> None:
        if len(data) != _WORDS.size:
            raise ValueError(f"key_bytes: expected {_WORDS.size} bytes, got {len(data)}")
        self._view[_KEY : _KEY + _WORDS.size] = data

    @property
    def cached_normal(self) -> float | None:
        """The second number of a pair of double normals, if one waits to be given out."""
        return float(_DOUBLE.unpack_from(self._view, _NORMAL)[0]) if self._int(_NORMAL_VALID) else None

    @cached_normal.setter
    def cached_normal(self, value: float | None) -> None:
        # torch writes 0 as the value where none waits.
        _DOUBLE.pack_into(self._view, _NORMAL, 0.0 if value is None else value)
        _INT.pack_into(self._view, _NORMAL_VALID, int(value is not None))


def _address(state: Tensor) -> int:
    with _unseen():
        if state.numel() == _BYTES:
            return state.data_ptr()
        raise RandomError(
            f"generator: expected one of torch's CPU generators (a state of {_BYTES} bytes), got a state of "
            f"{state.numel()} bytes; only CPU generators keep a normal number for later"
        )


def cached_normal(generator: torch.Generator) -> bool:
    """Whether a double normal number waits in a CPU generator.

    torch draws normals of small or strided tensors in pairs and keeps the second one of an odd count for the next call.

    >>> generator = torch.Generator().manual_seed(0)
    >>> _ = torch.randn(3, generator=generator)
    >>> cached_normal(generator)
    True
    """
    state = generator.get_state()
    return ctypes.c_int32.from_address(_address(state) + _NORMAL_VALID).value != 0


def cached_normal_value(generator: torch.Generator) -> float | None:
    """The double normal number that waits in a CPU generator, or None."""
    return Mt19937State.of(generator).cached_normal


def set_cached_normal(generator: torch.Generator, value: float | None) -> None:
    """Let a CPU generator give out `value` as its next double normal number; None: let nothing wait."""
    state = Mt19937State.of(generator)
    state.cached_normal = value
    state.restore(generator)


def clear_cached_normal(generator: torch.Generator) -> None:
    """Drop the double normal number that waits in a CPU generator, if any; the words to come stay the same."""
    state = generator.get_state()
    address = _address(state)
    valid = ctypes.c_int32.from_address(address + _NORMAL_VALID)
    if valid.value:
        valid.value = 0
        ctypes.c_double.from_address(address + _NORMAL).value = 0.0
        generator.set_state(state)
