"""The state of the portable stream: a seed, and how many operators have drawn.

Within `portable` the state lives in torch's default CPU generator, so that whatever saves and restores that
(activation checkpointing, `fork_rng`, checkpoints of a run) does so with the stream, and `torch.manual_seed` seeds it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import RandomError
from .laws import make_law
from .philox import philox_blocks
from .source import PortableSource
from .whole import portable_whole

__all__ = ["PortableGenerator"]

_MASK64 = (1 << 64) - 1
_STATE = struct.Struct("<8sQQ")
_STATE_NAME = b"portabl1"
_BEGINNING = struct.Struct("<QixxxxQ7Q")
_MARK = (0x706F7274, 0x61626C31)
"""Two words that tell our state of the default generator from one that torch has made."""


class PortableGenerator:
    """Counter-based random numbers that are the same on every device, and for every sharding.

    Element i of the n-th operator call is a function of (seed, n, i) alone, where i counts in memory order of the whole
    tensor on one device (for contiguous tensors that is row-major order). Every call takes one step of n, whatever its
    size. Give one as `generator=` to this package's functions, or make it the source of all numbers with `portable`.

    Args:
        seed: any integer of 64 bits; negative ones wrap as in `torch.manual_seed`.
        counter: number of the next operator call.

    >>> g = PortableGenerator(7)
    >>> g.initial_seed(), g.counter, g.get_state().shape
    (7, 0, torch.Size([24]))
    """

    def __init__(self, seed: int = 0, *, counter: int = 0) -> None:
        self._own = (_seed(seed), _counter(counter))
        self._bound = False

    def __repr__(self) -> str:
        seed, counter = self._read()
        return f"PortableGenerator({seed}, counter={counter})"

    def manual_seed(self, seed: int) -> PortableGenerator:
        """Start the stream of a seed from its first call; returns the generator."""
        self._write(_seed(seed), 0)
        return self

    def initial_seed(self) -> int:
        """Return the seed, 0 <= seed < 2**64."""
        return self._read()[0]

    @property
    def counter(self) -> int:
        """Number of the next operator call; may be set, to go back or ahead."""
        return self._read()[1]

    @counter.setter
    def counter(self, value: int) -> None:
        self._write(self._read()[0], _counter(value))

    def get_state(self) -> Tensor:
        """Return seed and counter as 24 bytes (uint8): the same on every rank, so one copy serves any world."""
        return torch.tensor(list(_STATE.pack(_STATE_NAME, *self._read())), dtype=torch.uint8, device="cpu")

    def set_state(self, state: Tensor) -> None:
        """Go to a state that `get_state` returned.

        Raises:
            RandomError: for other bytes.
        """
        if state.dtype != torch.uint8 or tuple(state.shape) != (_STATE.size,):
            raise RandomError(f"state has to be {_STATE.size} bytes, got {tuple(state.shape)} of {state.dtype}")
        name, seed, counter = _STATE.unpack(bytes(state.tolist()))
        if name != _STATE_NAME:
            raise RandomError(f"state is not one of PortableGenerator.get_state(): it begins with {name!r}")
        self._write(seed, counter)

    # -- the sampler protocol of _draw ----------------------------------------------------------------------------

    def source(
        self,
        op: str,
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        args: tuple[Any, ...],
    ) -> PortableSource:
        """Begin a draw; see `_draw.source.Sampler`."""
        law = make_law(op, dtype, args)
        return PortableSource(law, math.prod(shape), *self._read(), self._step)

    def save(self) -> object:
        """Return the state, for `restore`."""
        return self._read()

    def restore(self, token: object) -> None:
        """Go back to a saved state."""
        assert isinstance(token, tuple)
        self._write(*token)

    def whole(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run `randperm` or `multinomial` (arguments as of torch's functions) as one call.

        >>> PortableGenerator(0).whole("randperm", (5,), {})
        tensor([3, 1, 2, 4, 0])
        """
        seed, call = self._read()

        def bits(count: int, device: torch.device) -> Tensor:
            even, odd = philox_blocks(seed, call, 0, -(-count // 2), device)
            return even.bitwise_left_shift_(32).bitwise_or_(odd).t().reshape(-1)[:count]

        result = portable_whole(op, bits, args, kwargs)
        self._step()
        return result

    # -- where the state is -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        seed, counter = self._read()
        self._write(seed, (counter + 1) & _MASK64)

    def _read(self) -> tuple[int, int]:
        if self._bound:
            self._own = _from_default(self._own)
        return self._own

    def _write(self, seed: int, counter: int) -> None:
        self._own = (seed, counter)
        if self._bound:
            _to_default(seed, counter)

    def _bind(self) -> None:
        """Keep the state in torch's default CPU generator from now on."""
        self._bound = True
        _to_default(*self._own)

    def _unbind(self) -> None:
        self._read()
        self._bound = False


def _seed(value: int) -> int:
    if not -(1 << 63) <= value <= _MASK64:
        raise RandomError(f"seed has to be within -2**63 and 2**64 - 1, got {value}")
    return value & _MASK64


def _counter(value: int) -> int:
    if not 0 <= value <= _MASK64:
        raise RandomError(f"counter has to be within 0 and 2**64 - 1, got {value}")
    return value


# The default CPU generator's state: u64 seed, i32 left, i32 seeded, u64 next, then 624 words of 32 bits in u64 each.
# Freshly seeded, left is 1 and next is 0. Ours looks like that, but the words after the first hold mark and state; the
# others are those of the seed, so that a draw that passes by this package still gets random numbers.


def _to_default(seed: int, counter: int) -> None:
    # By address: torch operators would each pass through the block's dispatch mode.
    state = torch.default_generator.get_state()
    words = struct.pack("<6Q", *_MARK, seed & 0xFFFFFFFF, seed >> 32, counter & 0xFFFFFFFF, counter >> 32)
    content = _seeded(seed)
    ctypes.memmove(state.data_ptr(), content[:32] + words + content[80:], len(content))
    torch.default_generator.set_state(state)


@functools.lru_cache(maxsize=16)
def _seeded(seed: int) -> bytes:
    state = torch.Generator().manual_seed(seed).get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _from_default(known: tuple[int, int]) -> tuple[int, int]:
    state = torch.default_generator.get_state()
    seed, left, position, *words = _BEGINNING.unpack(ctypes.string_at(state.data_ptr(), _BEGINNING.size))
    if tuple(words[1:3]) == _MARK:
        return words[3] | words[4] << 32, words[5] | words[6] << 32
    second = (1812433253 * (words[0] ^ words[0] >> 30) + 1) & 0xFFFFFFFF
    fresh = left == 1 and position == 0 and words[1] == second
    if fresh or seed != known[0]:
        return seed, 0  # torch.manual_seed
    warnings.warn(
        "within portable(), something drew from torch's own generator and got numbers that are not portable: a thread "
        "that the program started (the block holds on its own thread and those of autograd), or code below torch's "
        "dispatcher. The portable stream goes on where it was.",
        RuntimeWarning,
        stacklevel=2,
    )
    _to_default(*known)
    return known
