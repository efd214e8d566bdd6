"""Host buffers that are used again from save to save: fresh memory costs several times the copy into it.

Pinned where CUDA is in use, so that copies from the device are asynchronous and fast. A copy it is, and no snapshot by
fork: that returns sooner, but then the training pays more than the copy when it next writes to the shared pages
(`benchmarks/ckpt.py snapshot`), and forking is not safe beside threads and process groups.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError

__all__ = ["PoolStats", "StagingPool", "default_pool", "parse_bytes"]

PAGE = 4096
SLACK = 1 << 20
"""A buffer may be larger than asked for by this, or twice as large."""
TOUCH = 16384
"""Pages that are touched at a time: fewer elements than torch hands to its intra-op threads."""
_UNITS = {"": 1, "B": 1, **{f"{p}{s}": b**n for n, p in enumerate("KMGT", 1) for s, b in (("B", 1000), ("iB", 1024))}}


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool has done."""

    held: int
    """Bytes that the pool has from the system."""
    used: int
    """Bytes of those that are given out."""
    fresh: int
    """How often memory had to be taken from the system."""
    reused: int
    """How often a buffer was used again."""


class StagingPool:
    """Buffers of host memory. Threads may use it at once.

    Example:
        >>> import vescale_ckpt as ck
        >>> pool = ck.StagingPool(limit="1MiB")
        >>> buffer = pool.take(1000)
        >>> buffer.dtype, buffer.numel()
        (torch.uint8, 1000)
        >>> pool.give(buffer)
        >>> pool.take(900).data_ptr() == buffer.data_ptr()
        True
    """

    def __init__(self, limit: int | str | None = None) -> None:
        """Make an empty pool.

        Args:
            limit: most bytes that it may hold, e.g. "8GiB"; None: no limit.
        """
        self.limit = None if limit is None else parse_bytes(limit, "limit")
        self._changed = threading.Condition()
        self._free: list[Tensor] = []
        self._used: dict[int, Tensor] = {}
        self._fresh = self._reused = 0

    def __repr__(self) -> str:
        stats = self.stats()
        return f"StagingPool({stats.used} of {stats.held} bytes in use, limit {self.limit})"

    def take(self, nbytes: int, timeout: float | None = None) -> Tensor:
        """Return a buffer, 1-D uint8, that begins at a page; its content is any.

        Waits while the limit does not allow it and buffers are in use.

        Args:
            nbytes: length, at least 0.
            timeout: most seconds to wait; None: as long as it takes.

        Raises:
            CheckpointError: the limit can never allow it, or does not until `timeout`.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes: expected at least 0, but got {nbytes}.")
        if self.limit is not None and nbytes > self.limit:
            raise CheckpointError(
                f"staging: this rank has to copy {nbytes} bytes, but its host buffers are limited to {self.limit}. "
                f"Raise the limit (`staging_bytes`), or save synchronously: that copies nothing that is on the CPU."
            )
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (buffer := self._find(nbytes)) is None:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    used = _total(self._used.values())
                    raise CheckpointError(
                        f"staging: this rank has to copy {nbytes} bytes; for {timeout:g} s running saves have kept "
                        f"{used} of the {self.limit} bytes that its host buffers may have. Save less often, raise the "
                        f"limit (`staging_bytes`), or wait for running saves first."
                    )
                self._changed.wait(left)
            self._used[buffer.data_ptr()] = buffer
            return buffer[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. The caller must not touch it any more.

        Raises:
            ValueError: it is not from this pool, or was given back before.
        """
        with self._changed:
            whole = self._used.pop(buffer.data_ptr(), None)
            if whole is None:
                raise ValueError("buffer: it is not from this pool, or was given back before.")
            self._free.append(whole)
            self._changed.notify_all()

    def warm(self, nbytes: int) -> None:
        """Hold a buffer of `nbytes` with all its pages, so that the first save is as fast as later ones."""
        buffer = self.take(nbytes)
        try:
            for pages in torch.split(buffer[::PAGE], TOUCH):
                pages.zero_()
        finally:
            self.give(buffer)

    def release(self) -> None:
        """Give the memory that is not in use back to the system."""
        with self._changed:
            self._free.clear()
            self._changed.notify_all()

    def stats(self) -> PoolStats:
        """Return what the pool holds and has done."""
        with self._changed:
            used = _total(self._used.values())
            return PoolStats(used + _total(self._free), used, self._fresh, self._reused)

    def _find(self, nbytes: int) -> Tensor | None:
        """Return a free buffer or a fresh one; None if the limit allows neither now."""
        pinned = _pins()
        large = [b for b in self._free if b.numel() >= max(nbytes, 1) and (b.is_pinned() or not pinned)]
        best = min(large, key=Tensor.numel, default=None)
        room = None if self.limit is None else self.limit - _total(self._used.values())
        spare = room is None or room - _total(self._free) >= _rounded(nbytes)
        if best is not None and (best.numel() <= max(2 * nbytes, nbytes + SLACK) or not spare):
            self._drop(best)
            self._reused += 1
            return best
        if room is not None and room < nbytes:
            return None
        # The fresh one takes the place of the largest that was too small, so a state that grows leaves no trail.
        small = [b for b in self._free if b.numel() < nbytes or (pinned and not b.is_pinned())]
        if small:
            self._drop(max(small, key=Tensor.numel))
        size = _rounded(nbytes) if room is None else min(_rounded(nbytes), room)
        while room is not None and self._free and room - _total(self._free) < size:
            self._drop(min(self._free, key=Tensor.numel))
        try:
            buffer = _allocate(size, pinned)
        except (MemoryError, RuntimeError):
            if not self._free:
                raise
            self._free.clear()  # what is kept for later must not keep this save from going on
            buffer = _allocate(nbytes, pinned)
        self._fresh += 1
        return buffer

    def _drop(self, buffer: Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]


def _total(buffers: Iterable[Tensor]) -> int:
    return sum(buffer.numel() for buffer in buffers)


def _rounded(nbytes: int) -> int:
    """Return a little more, a multiple of pages, so that a state may grow a little without fresh memory."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 5, 0))
    return max(-(-nbytes // step) * step, PAGE)


def _pins() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]


def parse_bytes(size: int | str, name: str) -> int:
    """Return a number of bytes.

    Args:
        size: an integer, or a text such as "8GiB", "500MB", "4096".
        name: of the argument, for the message.

    Raises:
        ValueError: neither.

    Example:
        >>> parse_bytes("1.5KiB", "limit"), parse_bytes("2MB", "limit")
        (1536, 2000000)
    """
    if type(size) is int and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size, re.ASCII) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f'{name}: expected a number of bytes such as 4096, "500MB" or "8GiB", but got {size!r}.')
    return int(float(match[1]) * _UNITS[match[2]])


_default = StagingPool()


def default_pool() -> StagingPool:
    """Return the pool that saves share if they are not given one."""
    return _default


def _renew_default_pool() -> None:
    global _default
    _default = StagingPool()


# A thread that is not there in a forked child may have held the lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_default_pool)
