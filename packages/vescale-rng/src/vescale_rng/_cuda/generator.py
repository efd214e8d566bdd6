"""The generator of an emulated GPU: a seed and an offset, as CUDA's generators hold them, and the sampler over them."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from .._draw.borrowed import Borrowed, BorrowedGenerator, pack_state, unpack_state
from .._integers import MASK64, integer, seed_of
from ..errors import RandomError
from .laws import law_of
from .profile import DeviceProfile
from .sources import EmulatedSource

__all__ = ["EmulatedGenerator"]

_STATE = struct.Struct("<QQ")


class EmulatedGenerator(BorrowedGenerator):
    """Random numbers that a GPU model would draw, computed on the CPU.

    Within `emulate_cuda` it is what every random operator draws from. It can also be given as `generator=` to this
    package's functions (torch's own refuse it).

    Args:
        profile: of the GPU.
        seed: any integer of 64 bits; negative ones wrap as in `torch.manual_seed`.

    Raises:
        RandomError: if the seed is out of range.
        TypeError: if `profile` is no profile, or `seed` no integer.

    >>> g = EmulatedGenerator(DeviceProfile.of("H100"), 7)
    >>> g.initial_seed(), g.get_offset(), g.get_state().shape
    (7, 0, torch.Size([16]))
    """

    def __init__(self, profile: DeviceProfile, seed: int = 0) -> None:
        if not isinstance(profile, DeviceProfile):
            raise TypeError(f"profile: expected a DeviceProfile, got {profile!r}; DeviceProfile.of finds one by name")
        self.profile = profile
        self._state = Borrowed("emulate_cuda", seed_of(seed), 0)

    def __repr__(self) -> str:
        seed, offset = self._state.read()
        return f"EmulatedGenerator({self.profile.name!r}, seed={seed}, offset={offset})"

    def get_offset(self) -> int:
        """Return the offset: words that each thread has passed, a multiple of 4."""
        return self._state.read()[1]

    def set_offset(self, offset: int) -> None:
        """Set the offset.

        Raises:
            RandomError: if it is no multiple of 4, as CUDA's generators.
            TypeError: if it is no integer.
        """
        offset = integer("offset", offset)
        if not 0 <= offset <= MASK64 or offset % 4:
            raise RandomError(f"offset has to be a multiple of 4 within 64 bits, got {offset}")
        self._state.write(self._state.read()[0], offset)

    def get_state(self) -> Tensor:
        """Return seed and offset as 16 bytes (uint8), the same that a CUDA generator's `get_state` returns."""
        return pack_state(_STATE, *self._state.read())

    def set_state(self, state: Tensor) -> None:
        """Go to a state of `get_state`, of this generator or of a CUDA one.

        Raises:
            RandomError: for a tensor of anything but 16 bytes.
            TypeError: for anything but a tensor.
        """
        seed, offset = unpack_state(_STATE, state)
        self._state.write(seed, offset)

    # ------------------------------------------------------------------ the sampler protocol of _draw

    def source(
        self,
        op: str,
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        args: tuple[Any, ...],
    ) -> EmulatedSource:
        """Begin a draw; see `_draw.source.Sampler`. For "dropout", dtype and stride are those of its input."""
        law = law_of(op, dtype, shape, stride, args)
        self._state.begin_draw()
        return EmulatedSource(law, shape, stride, self.initial_seed(), self, self.profile)
