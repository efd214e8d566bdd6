"""Which shared memory this rank owns, where a tensor lies in it, and that of the others as it becomes known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TransportError
from .shared_board import COMMON, DIRECT, STAGED, Place
from .shared_memory import Segment, attach, create, is_gone

__all__ = ["Places"]

ARENA = 1 << 20
"""Bytes of a segment that small buffers share, for each segment takes a file descriptor."""
ALIGN = 64
KEEP = 256 << 20
"""Bytes of staging memory that are kept while nobody uses them."""


class Places:
    """Shared memory as one rank sees it."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Begin with nothing.

        Args:
            pids: of the processes of the ranks.
        """
        self._pids = pids
        self._known: dict[int, tuple[int, Place]] = {}
        """By address: end, and the place of the first byte, of the segments that this rank may name to others."""
        self._seen: dict[tuple[int, int], tuple[Segment, Tensor]] = {}
        """By rank and serial, segments of others."""
        self._arena: Segment | None = None
        self._used = 0
        self._free: list[Tensor] = []
        """Staging memory, by length."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return zeroed shared bytes.

        Raises:
            OSError: no memory, or no file descriptors.
        """
        if nbytes > ARENA // 4:
            return self._new(nbytes).tensor(0, nbytes)
        if self._arena is None or self._used + nbytes > ARENA:
            self._arena, self._used = self._new(ARENA), 0
        start = self._used
        self._used += -(-nbytes // ALIGN) * ALIGN
        return self._arena.tensor(start, nbytes)

    def _new(self, nbytes: int) -> Segment:
        segment = create(nbytes)
        self._know(segment, Place(DIRECT, segment.serial, segment.fd, segment.nbytes, 0))
        return segment

    def _know(self, segment: Segment, place: Place) -> None:
        self._known[segment.address] = (segment.address + segment.nbytes, place)
        segment.when_freed(self._known.pop, segment.address, None)

    def make_common(self, nbytes: int) -> tuple[Tensor, Place]:
        """Make memory that other ranks will use as theirs, too."""
        segment = create(nbytes)
        place = Place(COMMON, segment.serial, segment.fd, segment.nbytes, 0)
        self._know(segment, place)
        return segment.tensor()[:nbytes], place

    def join_common(self, peer: int, place: Place, nbytes: int) -> Tensor:
        """Use memory that another rank made."""
        segment = self._attach(peer, place)
        self._know(segment, place)
        return segment.tensor()[:nbytes]

    def find(self, flat: Tensor) -> Place | None:
        """Return where a contiguous tensor lies in shared memory; None if it does not."""
        start = flat.data_ptr()
        for address, (end, place) in list(self._known.items()):
            if address <= start and start + flat.nbytes <= end:
                return Place(place.kind, place.serial, place.fd, place.nbytes, start - address)
        return None

    def stage(self, nbytes: int) -> tuple[Tensor, Place]:
        """Lend shared bytes with undefined values."""
        room = next((index for index, free in enumerate(self._free) if free.numel() >= nbytes), None)
        if room is None:
            # Rounded up by an eighth at most, so that buffers of many sizes find a match.
            step = max(1 << 16, 1 << max(0, nbytes.bit_length() - 4))
            memory = self._new(-(-nbytes // step) * step).tensor()
        else:
            memory = self._free.pop(room)
        found = self.find(memory)
        assert found is not None  # it was made here
        return memory, Place(STAGED, found.serial, found.fd, found.nbytes, found.offset)

    def give_back(self, memory: Tensor) -> None:
        """Take staging memory back; no rank may read it any more."""
        self._free.append(memory)
        self._free.sort(key=Tensor.numel)
        while sum(map(Tensor.numel, self._free)) > KEEP:
            self._free.pop(0)

    def view(self, peer: int, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """Return numbers of another rank, without a copy.

        Raises:
            TransportError: its memory cannot be opened.
        """
        known = self._seen.get((peer, place.serial))
        if known is None:
            self._forget_freed()
            segment = self._attach(peer, place)
            known = self._seen[peer, place.serial] = (segment, segment.tensor())
        stop = place.offset + numel * dtype.itemsize
        return known[1][place.offset : stop].view(dtype)

    def _attach(self, peer: int, place: Place) -> Segment:
        pid = self._pids[peer]
        try:
            return attach(pid, place.fd, place.nbytes, place.serial)
        except OSError as error:
            raise TransportError(
                f"cannot open shared memory of rank {peer} (process {pid}), which may have ended: {error}"
            ) from error

    def _forget_freed(self) -> None:
        for key, (segment, _) in list(self._seen.items()):
            if is_gone(self._pids[key[0]], segment):
                del self._seen[key]

    def clear(self) -> None:
        """Let go of all that is kept; what tensors refer to stays mapped until they die."""
        self._free.clear()
        self._seen.clear()
        self._known.clear()
        self._arena = None
