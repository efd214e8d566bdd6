"""The board of each rank in shared memory: what it is about to do, how far it is, and whether it gave up.

A rank writes its own board only. A collective has a slot, reused when all ranks are through with it; the slot tells
what was asked for and where the numbers are, and a counter of phases. Another counter changes whenever anything does:
on that one the others sleep.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import shared_futex as futex
from .call import Call
from .shared_memory import Segment, started

__all__ = ["ARRIVED", "DONE", "REDUCED", "SLOTS", "Board", "Place", "Post"]

SLOTS = 64
"""Collectives that may be under way."""
ARRIVED, REDUCED, DONE = 1, 2, 3
"""Phases of a collective on one rank: it posted where its numbers are; its part is summed; it touches no other rank's
memory any more."""

_HEADER, _SLOT = 1024, 128
_EVENT, _FAILED, _LENGTH, _TEXT = 0, 64, 68, 72
_MASK = 0xFFFFFFFF
_POST = struct.Struct("<16sIIIidqiqqqq")
_DTYPES = sorted((dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)), key=str)
"""The same on all ranks; aliases come twice, which does no harm."""

NOWHERE, STAGED, DIRECT, COMMON = range(4)
"""Kinds of places: no numbers to read; a copy of them; the buffer itself; memory that all ranks have in common."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where numbers are in shared memory."""

    kind: int
    """NOWHERE, STAGED, DIRECT or COMMON."""
    serial: int = 0
    """Of the segment."""
    fd: int = -1
    """Of the segment, in its owner."""
    nbytes: int = 0
    """Length of the segment."""
    offset: int = 0
    """Of the first number, in bytes."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank posts when it comes to a collective."""

    call: Call
    """What it asks for."""
    place: Place
    """Where its numbers are."""


class Board:
    """The boards of all ranks of a group."""

    BYTES = _HEADER + SLOTS * _SLOT

    def __init__(self, segments: Sequence[Segment], rank: int, pids: Sequence[int], starts: Sequence[int]) -> None:
        """Take the boards.

        Args:
            segments: by rank, of `BYTES` bytes or more.
            rank: this one.
            pids: of the processes of the ranks.
            starts: when these started, for process ids are used again.
        """
        self.rank, self.size, self.pids = rank, len(segments), pids
        self._starts = starts
        self._addresses = [segment.address for segment in segments]
        self._bytes = [memoryview(segment.memory).cast("B") for segment in segments]
        self._words = [view.cast("I") for view in self._bytes]

    def post(self, number: int, post: Post) -> None:
        """Come to a collective; its slot must be free."""
        call, place = post.call, post.place
        _POST.pack_into(
            self._bytes[self.rank],
            _at(number) + 8,
            call.operation.encode(),
            _DTYPES.index(call.dtype),
            _DTYPES.index(call.accumulate or call.dtype),
            0 if call.accumulate is None else 1,
            call.source,
            call.divisor,
            call.numel,
            place.kind,
            place.serial,
            place.fd,
            place.nbytes,
            place.offset,
        )
        self.mark(number, ARRIVED)

    def read(self, peer: int, number: int) -> Post:
        """Return what a rank posted; it must have arrived."""
        operation, dtype, accumulate, summed, source, divisor, numel, *place = _POST.unpack_from(
            self._bytes[peer], _at(number) + 8
        )
        total = _DTYPES[accumulate] if summed else None
        call = Call(operation.rstrip(b"\0").decode(), numel, _DTYPES[dtype], divisor, total, source)
        return Post(call, Place(*place))

    def mark(self, number: int, phase: int) -> None:
        """Go on to a phase, and wake who waits for it."""
        words, address = self._words[self.rank], self._addresses[self.rank]
        futex.fence(address)
        words[_at(number) // 4] = (4 * number + phase) & _MASK
        self._ring()

    def reached(self, peer: int, number: int, phase: int) -> bool:
        """Tell whether a rank has come to a phase of a collective, or further."""
        behind = (self._words[peer][_at(number) // 4] - 4 * number - phase) & _MASK
        if behind > _MASK >> 1:
            return False
        futex.fence(self._addresses[self.rank])
        return True

    def event(self, peer: int) -> int:
        """Return a number that changes with whatever a rank does."""
        return self._words[peer][_EVENT // 4]

    def sleep(self, peer: int, seen: int, seconds: float) -> None:
        """Wait until `event` of a rank is not `seen` any more, but not longer than that."""
        futex.wait(self._addresses[peer] + _EVENT, seen, seconds)

    def give_up(self, text: str) -> None:
        """Tell all ranks that this one cannot go on, and why."""
        words, encoded = self._words[self.rank], text.encode()[: _HEADER - _TEXT]
        if words[_FAILED // 4]:
            return
        self._bytes[self.rank][_TEXT : _TEXT + len(encoded)] = encoded
        words[_LENGTH // 4] = len(encoded)
        futex.fence(self._addresses[self.rank])
        words[_FAILED // 4] = 1
        self._ring()

    def failure(self) -> tuple[int, str] | None:
        """Return a rank that gave up, and its words."""
        for peer in range(self.size):
            if self._words[peer][_FAILED // 4]:
                length = self._words[peer][_LENGTH // 4]
                return peer, bytes(self._bytes[peer][_TEXT : _TEXT + length]).decode(errors="replace")
        return None

    def is_alive(self, peer: int) -> bool:
        """Tell whether the process of a rank still runs."""
        return self.pids[peer] == os.getpid() or started(self.pids[peer]) == self._starts[peer]

    def _ring(self) -> None:
        words, address = self._words[self.rank], self._addresses[self.rank] + _EVENT
        futex.fence(address)
        words[_EVENT // 4] = (words[_EVENT // 4] + 1) & _MASK
        futex.wake(address)


def _at(number: int) -> int:
    return _HEADER + number % SLOTS * _SLOT
