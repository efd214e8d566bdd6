"""Memory that the ranks of one host share, without names: nothing is left behind however a process ends.

A segment is a `memfd`, which other processes of the same user open through /proc while its owner holds it open. Unlike
files in /dev/shm it is not bound by the size of that file system, which containers keep small.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Segment", "attach", "available_bytes", "create", "is_gone", "started"]

HUGE = 4 << 20
"""Bytes from which on huge pages are asked for."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: make all pages now, so that a lack of memory is an error here, not a signal."""

_serials = itertools.count(1)
# Not the module mmap, which keeps a file descriptor for each mapping; there may be hundreds.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """A run of shared memory, mapped into this process as long as something refers to `memory`, as tensors do."""

    def __init__(self, fd: int, nbytes: int, serial: int) -> None:
        """Map a file.

        Args:
            fd: of the file; it may be closed afterwards.
            nbytes: its length.
            serial: number that its owner gave it.

        Raises:
            OSError: it cannot be mapped.
        """
        status = os.fstat(fd)
        if status.st_size != nbytes:
            raise OSError(f"the shared file has {status.st_size} bytes, not {nbytes}")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {nbytes} bytes of shared memory: {os.strerror(number)}")
        self.memory: Any = (ctypes.c_char * nbytes).from_address(address)
        self.address: int = address
        """Where it begins in this process."""
        self.nbytes = nbytes
        """Length."""
        self.serial = serial
        """Number that its owner gave it."""
        self.fd = fd
        """By which other processes find it, in its owner."""
        self.identity = (status.st_dev, status.st_ino)
        """Device and inode."""
        self.when_freed(_libc.munmap, address, nbytes)

    def when_freed(self, function: Callable[..., object], *arguments: object) -> None:
        """Have a function called when nothing refers to the memory any more, unless the process ends before."""
        weakref.finalize(self.memory, function, *arguments).atexit = False

    def tensor(self, start: int = 0, nbytes: int | None = None) -> Tensor:
        """Return bytes of it, all by default, with a storage of their own: what looks at those finds no others."""
        count = self.nbytes - start if nbytes is None else nbytes
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=count, offset=start)


def create(nbytes: int) -> Segment:
    """Make a zeroed segment; it can be opened by others until it is freed here.

    Raises:
        OSError: no file descriptors or mappings, or no such thing on this system.
        MemoryError: there is not enough memory.
    """
    nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    free = available_bytes()
    if nbytes > free:
        raise MemoryError(f"shared memory of {nbytes} bytes was asked for, but only {free} bytes are available")
    fd = os.memfd_create("vescale_comm", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        segment = Segment(fd, nbytes, next(_serials))
        if nbytes >= HUGE:
            # Where there are none for shared memory, ordinary pages do.
            _libc.madvise(segment.address, nbytes, mmap.MADV_HUGEPAGE)
        if _libc.madvise(segment.address, nbytes, POPULATE_WRITE):
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    segment.when_freed(os.close, fd)
    return segment


def attach(pid: int, fd: int, nbytes: int, serial: int) -> Segment:
    """Map a segment of another process.

    Args:
        pid: of its owner.
        fd: under which its owner has it.
        nbytes: its length.
        serial: number that its owner gave it.

    Raises:
        OSError: it cannot be opened.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        segment = Segment(own, nbytes, serial)
    finally:
        os.close(own)
    segment.fd = fd
    return segment


def is_gone(pid: int, segment: Segment) -> bool:
    """Tell whether the owner of an attached segment has freed it."""
    try:
        status = os.stat(f"/proc/{pid}/fd/{segment.fd}")
    except OSError:
        return True
    return (status.st_dev, status.st_ino) != segment.identity


def available_bytes() -> int:
    """Return how much memory can be taken without swapping: of the machine, or of the control group if that is less."""
    found = [line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    free = int(found[0]) * 1024 if found else 1 << 62
    limit, used = list(_lines("/sys/fs/cgroup/memory.max")), list(_lines("/sys/fs/cgroup/memory.current"))
    if limit and used and limit[0].isdigit():
        cached = [
            int(line.split()[1]) for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith("inactive_file")
        ]
        free = min(free, int(limit[0]) - int(used[0]) + sum(cached))
    return max(free, 0)


def started(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; -1 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


def _lines(path: str) -> Iterator[str]:
    try:
        yield from Path(path).read_text().splitlines()
    except OSError:
        return
