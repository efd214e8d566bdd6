"""Keeps the seed and position of another stream in torch's default CPU generator, within a block.

Whatever saves and restores that generator (activation checkpointing, `fork_rng`, checkpoints of a run) then does so
with the stream, and `torch.manual_seed` seeds it. The state looks freshly seeded, but words after the first hold a mark
and the position; the others are those of the seed, so that a draw that passes by this package still is random (zeros
would let rejection samplers run forever). No state can make torch raise, so a checkpoint is told by an extra tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._integers import seed_of
from .._streams.locate import words_since_seed
from ..errors import RandomError

__all__ = [
    "BLOCKS",
    "Borrowed",
    "BorrowedGenerator",
    "block",
    "block_name",
    "pack_state",
    "state_bytes",
    "unpack_state",
]

_Generator = TypeVar("_Generator", bound="BorrowedGenerator")

# The state: u64 seed, i32 left, i32 seeded, u64 next, then 624 words of 32 bits in u64 each. Freshly seeded, left is 1
# and next is 0; any draw changes that.
_BEGINNING = struct.Struct("<QixxxxQ7Q")
_FIRST, _LAST = 32, 80
"""Bytes of the state that hold ours: all words but the first up to the position's."""
BLOCKS: dict[str, tuple[int, int]] = {
    "portable": (0x706F7274, 0x61626C31),
    "emulate_cuda": (0x656D756C, 0x63756461),
}
"""Two words for each kind of block that tell its states from others and from those that torch makes."""
_SEARCHED = 10**8
"""Words of torch's own stream among which a state with our seed is looked for: it takes 0.05 s."""

_lock = threading.Lock()
_blocks: list[Borrowed] = []
_thread = 0


class Borrowed:
    """Seed and position of a stream; they lie in torch's default generator while a `block` of it lasts.

    Args:
        kind: which block, a key of `BLOCKS`.
        seed: 64 bits, not negative.
        position: 64 bits, not negative.
    """

    def __init__(self, kind: str, seed: int, position: int) -> None:
        self.kind = kind
        self._own = (seed, position)
        self._bound = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies have a state of their own, also of a stream whose block lasts."""
        return {"kind": self.kind, "_own": self.read(), "_bound": False}

    def read(self) -> tuple[int, int]:
        """Return seed and position.

        Raises:
            RandomError: if a state that is not one of the block's kind was loaded into the default generator.
        """
        if self._bound:
            self._own = self._look()
        return self._own

    def write(self, seed: int, position: int) -> None:
        """Set seed and position."""
        self._own = (seed, position)
        if self._bound:
            _lend(BLOCKS[self.kind], seed, position)

    def begin_draw(self) -> None:
        """Let a checkpoint that runs now know that it draws in a block, so that it is not recomputed outside of one.

        `torch.utils.checkpoint` compares the tensors saved for backward with those of the recomputation: an empty one
        of ours among them makes it raise if only one of the two ran within a block.
        """
        if self._bound:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
                hooks[0](_saved())

    def bind(self) -> None:
        """Keep the state in torch's default generator from now on."""
        self._bound = True
        _lend(BLOCKS[self.kind], *self._own)

    def unbind(self) -> None:
        """Keep the state here again; one that is not the block's ends with it."""
        try:
            with contextlib.suppress(RandomError):  # a state of torch's was loaded, and nothing has been drawn since
                self.read()
        finally:
            self._bound = False

    def _look(self) -> tuple[int, int]:
        seed, left, following, *words = _BEGINNING.unpack(state_bytes(torch.default_generator)[: _BEGINNING.size])
        mark = (words[1], words[2])
        if mark == BLOCKS[self.kind]:
            return words[3] | words[4] << 32, words[5] | words[6] << 32
        if left == 1 and following == 0:
            first = seed & 0xFFFFFFFF
            if words[:2] == [first, (1812433253 * (first ^ first >> 30) + 1) & 0xFFFFFFFF]:
                return seed, 0  # torch.manual_seed
        elif seed == self._own[0] and not _on_own_stream():
            warnings.warn(
                f"within {self.kind}(), something drew from torch's own generator and got numbers that are "
                f"{_OTHERWISE[self.kind]}: a thread that the program started (the block holds on its own thread and "
                "those of autograd), or code below torch's dispatcher. The block's stream goes on where it was.",
                RuntimeWarning,
                stacklevel=4,
            )
            _lend(BLOCKS[self.kind], *self._own)
            return self._own
        other = next((f"of a block of {kind}" for kind, its in BLOCKS.items() if its == mark), "of torch's own stream")
        raise RandomError(
            f"within {self.kind}(), torch's default generator was set to a state {other} (seed {seed}), which is no "
            f"place in the block's stream. Load states that were saved within such a block, or call "
            "torch.manual_seed; a checkpointed forward and its backward belong into the same block"
        )


class BorrowedGenerator:
    """Common part of the generators of the blocks: a seed and a position, kept in `Borrowed`."""

    _state: Borrowed

    def manual_seed(self: _Generator, seed: int) -> _Generator:
        """Go to the beginning of the stream of a seed; returns the generator."""
        self._state.write(seed_of(seed), 0)
        return self

    def initial_seed(self) -> int:
        """Return the seed, 0 <= seed < 2**64."""
        return self._state.read()[0]

    def save(self) -> object:
        """Return the state, for `restore`."""
        return self._state.read()

    def restore(self, token: object) -> None:
        """Go back to a saved state."""
        assert isinstance(token, tuple)
        self._state.write(*token)


def pack_state(layout: struct.Struct, *fields: Any) -> Tensor:
    """Return fields as a tensor of bytes (uint8) on the CPU."""
    return torch.tensor(list(layout.pack(*fields)), dtype=torch.uint8, device="cpu")


def unpack_state(layout: struct.Struct, state: Any) -> tuple[Any, ...]:
    """Return the fields of what `pack_state` gave.

    Raises:
        RandomError: for a tensor of other bytes than `layout` has.
        TypeError: for anything but a tensor.
    """
    if not isinstance(state, Tensor):
        raise TypeError(f"state: expected the tensor that get_state returned, got {type(state).__name__}")
    if state.dtype != torch.uint8 or tuple(state.shape) != (layout.size,):
        raise RandomError(f"state has to be {layout.size} bytes, got {tuple(state.shape)} of {state.dtype}")
    return layout.unpack(bytes(state.tolist()))


_OTHERWISE = {"portable": "not portable", "emulate_cuda": "not those of the emulated GPU"}


def block_name() -> str | None:
    """Kind of the innermost block that has torch's default generator now, or None."""
    return _blocks[-1].kind if _blocks else None


@contextlib.contextmanager
def block(state: Borrowed) -> Iterator[None]:
    """Keep a stream's state in torch's default generator, which goes back to where it was at the end.

    Blocks of one thread may be nested.

    Args:
        state: of the stream.

    Raises:
        RandomError: if another thread is within a block, or the generator holds a state that was saved in one.
    """
    outer = _enter(state)
    try:
        before = torch.default_generator.get_state()
        if outer is None:
            _refuse_lent()
        else:
            outer.read()
            outer.unbind()
        state.bind()
        try:
            yield
        finally:
            try:
                state.unbind()
            finally:
                torch.default_generator.set_state(before)
                if outer is not None:
                    outer.bind()
    finally:
        del _blocks[max(i for i, other in enumerate(_blocks) if other is state)]


def _enter(state: Borrowed) -> Borrowed | None:
    """Add a block, and return the one around it."""
    global _thread
    with _lock:
        if _blocks and _thread != threading.get_ident():
            raise RandomError(
                f"{state.kind}: another thread is within a block of {_blocks[-1].kind}, and there is one default "
                "generator to keep the state in. Enter blocks one after the other, or give each thread a generator of "
                "its own as generator= to the functions of vescale_rng"
            )
        _thread = threading.get_ident()
        outer = _blocks[-1] if _blocks else None
        _blocks.append(state)
        return outer


def _refuse_lent() -> None:
    words = _BEGINNING.unpack(state_bytes(torch.default_generator)[: _BEGINNING.size])[4:6]
    for kind, mark in BLOCKS.items():
        if words == mark:
            raise RandomError(
                f"torch's default generator holds a state that was saved within a block of {kind}, and that was loaded "
                "outside of one: torch would draw other numbers from it. Load it within the block"
            )


def _on_own_stream() -> bool:
    """Whether the default generator stands where torch's own stream of its seed comes along, not behind our state."""
    try:
        words_since_seed(torch.default_generator, _SEARCHED)
    except RandomError:
        return False
    return True


# By address: torch operators would each pass through the modes that are active, and some of those fake them.


def _lend(mark: tuple[int, int], seed: int, position: int) -> None:
    state = torch.default_generator.get_state()
    words = struct.pack("<6Q", *mark, seed & 0xFFFFFFFF, seed >> 32, position & 0xFFFFFFFF, position >> 32)
    content = _seeded(seed)
    ctypes.memmove(state.data_ptr(), content[:_FIRST] + words + content[_LAST:], len(content))
    torch.default_generator.set_state(state)


def state_bytes(generator: torch.Generator) -> bytes:
    """Return the state of a generator of the CPU, also while modes fake what torch operators return."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


@functools.lru_cache(maxsize=16)
def _seeded(seed: int) -> bytes:
    return state_bytes(torch.Generator().manual_seed(seed))


@functools.cache
def _saved() -> Tensor:
    return torch.Generator().get_state()[:0]
