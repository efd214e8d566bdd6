"""The state of the portable stream: a seed, and how many operators have drawn.

Within `portable` the state lives in torch's default CPU generator, so that whatever saves and restores that
(activation checkpointing, `fork_rng`, checkpoints of a run) does so with the stream, and `torch.manual_seed` seeds it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._draw.borrowed import Borrowed, BorrowedGenerator, pack_state, unpack_state
from .._integers import MASK64, integer, seed_of
from ..errors import RandomError
from .laws import make_law
from .philox import philox_blocks
from .source import PortableSource
from .whole import portable_whole

__all__ = ["PortableGenerator"]

_STATE = struct.Struct("<8sQQ")
_STATE_NAME = b"portabl1"


class PortableGenerator(BorrowedGenerator):
    """Counter-based random numbers that are the same on every device, and for every sharding.

    Element i of the n-th operator call is a function of (seed, n, i) alone, where i counts in memory order of the whole
    tensor on one device (for contiguous tensors that is row-major order). Every call takes one step of n, whatever its
    size. Give one as `generator=` to this package's functions, or make it the source of all numbers with `portable`.

    Args:
        seed: any integer of 64 bits; negative ones wrap as in `torch.manual_seed`.
        counter: number of the next operator call.

    Raises:
        RandomError: if one of them is out of range.
        TypeError: if one of them is no integer.

    >>> g = PortableGenerator(7)
    >>> g.initial_seed(), g.counter, g.get_state().shape
    (7, 0, torch.Size([24]))
    """

    def __init__(self, seed: int = 0, *, counter: int = 0) -> None:
        self._state = Borrowed("portable", seed_of(seed), _counter(counter))

    def __repr__(self) -> str:
        seed, counter = self._state.read()
        return f"PortableGenerator({seed}, counter={counter})"

    @property
    def counter(self) -> int:
        """Number of the next operator call; may be set, to go back or ahead."""
        return self._state.read()[1]

    @counter.setter
    def counter(self, value: int) -> None:
        self._state.write(self._state.read()[0], _counter(value))

    def get_state(self) -> Tensor:
        """Return seed and counter as 24 bytes (uint8): the same on every rank, so one copy serves any world."""
        return pack_state(_STATE, _STATE_NAME, *self._state.read())

    def set_state(self, state: Tensor) -> None:
        """Go to a state that `get_state` returned.

        Raises:
            RandomError: for other bytes.
            TypeError: for anything but a tensor.
        """
        name, seed, counter = unpack_state(_STATE, state)
        if name != _STATE_NAME:
            raise RandomError(f"state is not one of PortableGenerator.get_state(): it begins with {name!r}")
        self._state.write(seed, counter)

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
        self._state.begin_draw()
        return PortableSource(law, math.prod(shape), *self._state.read(), self._step)

    def whole(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run `randperm` or `multinomial` (arguments as of torch's functions) as one call.

        >>> PortableGenerator(0).whole("randperm", (5,), {})
        tensor([3, 1, 2, 4, 0])
        """
        self._state.begin_draw()
        seed, call = self._state.read()

        def bits(count: int, device: torch.device) -> Tensor:
            even, odd = philox_blocks(seed, call, 0, -(-count // 2), device)
            return even.bitwise_left_shift_(32).bitwise_or_(odd).t().reshape(-1)[:count]

        result = portable_whole(op, bits, args, kwargs)
        self._step()
        return result

    def _step(self) -> None:
        seed, counter = self._state.read()
        self._state.write(seed, (counter + 1) & MASK64)


def _counter(value: int) -> int:
    number = integer("counter", value)
    if not 0 <= number <= MASK64:
        raise RandomError(f"counter has to be within 0 and 2**64 - 1, got {value}")
    return number
