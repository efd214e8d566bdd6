"""Data files of a local storage: positioned reads and writes of many buffers, by many threads.

The kernel takes some buffers of a call and some bytes of a buffer; the loops here go on until all is done.
A descriptor is closed only when no thread uses it: its number would be given to another file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import StorageError
from .failures import storage_error, too_short
from .interface import as_bytes

if TYPE_CHECKING:
    from .local import LocalStorage

IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))
"""Buffers that one call takes; POSIX promises 16, sysconf gives -1 for "no limit"."""

SLICE_BYTES = 512 << 10
"""What `read_checked` reads at a time: it is still in the nearest caches when the CRC is computed. Smaller slices cost
more than they save, on two threads more so."""

Transfer = Callable[[int, Sequence[memoryview], int], int]


def transfer_all(transfer: Transfer, fd: int, offset: int, buffers: list[memoryview]) -> int:
    """Call `os.pwritev` or `os.preadv` until all buffers are through, or a call moves nothing.

    Returns:
        The number of bytes that were moved.
    """
    start, first = offset, 0
    while first < len(buffers):
        moved = transfer(fd, buffers[first : first + IOV_MAX], offset)
        if moved == 0:
            break
        offset += moved
        while first < len(buffers) and moved >= buffers[first].nbytes:
            moved -= buffers[first].nbytes
            first += 1
        if moved:
            buffers[first] = buffers[first][moved:]
    return offset - start


def write_all(fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Write all bytes of the buffers at an offset; the list is used up."""
    views = as_bytes(buffers)
    total = sum(view.nbytes for view in views)
    written = transfer_all(os.pwritev, fd, offset, views)
    if written != total:
        raise OSError(errno.EIO, f"the file system took {written} of {total} bytes and gave no reason")


class _Descriptor:
    """A file descriptor that several threads use and that is closed when the last of them is done."""

    def __init__(self, fd: int, mode: str) -> None:
        # A FileIO that is lost unclosed closes itself and warns.
        self._file = io.FileIO(fd, mode)
        self._idle = threading.Condition()
        self._users = 0
        self._closing = False

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Yield the number; raise ValueError once the file is closed."""
        with self._idle:
            if self._closing:
                raise ValueError("the file is closed")
            self._users += 1
        try:
            yield self._file.fileno()
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def close(self, last: Callable[[int], None] | None = None) -> None:
        """Wait for all users, do something with the number, and close it; the second time does nothing."""
        with self._idle:
            if self._closing:
                return
            self._closing = True
            self._idle.wait_for(lambda: self._users == 0)
        try:
            if last:
                last(self._file.fileno())
        finally:
            self._file.close()


class LocalSink:
    """A new file of a LocalStorage; see Sink."""

    def __init__(self, fd: int, real: str, path: str, storage: LocalStorage) -> None:
        self._descriptor = _Descriptor(fd, "wb")
        self._real = real
        self._path = path
        self._storage = storage

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write buffers one after the other; see Sink.write."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, but is {offset} ({self._path!r})")
        views = as_bytes(buffers)
        with self._descriptor.use() as fd:
            try:
                write_all(fd, offset, views)
            except OSError as error:
                needed = sum(view.nbytes for view in views)
                raise self._error("write", error, needed) from error

    def close(self) -> None:
        """Flush the file to the device; see Sink.close."""
        try:
            self._descriptor.close(self._finish)
        except OSError as error:
            # Linux forgets which pages were lost once it has told so: a second fsync would lie.
            raise self._error("flush", error, None) from error

    def _finish(self, fd: int) -> None:
        self._storage.flush(fd)
        if os.fstat(fd).st_nlink == 0:
            raise OSError(errno.ESTALE, "somebody removed it while it was written; was it taken for garbage?")

    def abort(self) -> None:
        """Close and remove the file; see Sink.abort."""
        try:
            self._descriptor.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._real)
        except OSError as error:
            raise self._error("remove", error, None) from error

    def _error(self, action: str, error: OSError, needed: int | None) -> StorageError:
        return storage_error(action, self._path, self._storage.url, error, needed=needed)


class LocalSource:
    """A file of a LocalStorage that is read; see Source."""

    def __init__(self, fd: int, size: int, path: str, storage: LocalStorage) -> None:
        self._descriptor = _Descriptor(fd, "rb")
        self._path = path
        self._url = storage.url
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers one after the other; see Source.read_into."""
        views = as_bytes(buffers)
        wanted = sum(view.nbytes for view in views)
        if offset < 0 or offset + wanted > self.size:
            raise too_short(self._path, self._url, offset, wanted, self.size)
        with self._descriptor.use() as fd:
            try:
                read = transfer_all(os.preadv, fd, offset, views)
            except OSError as error:
                raise storage_error("read", self._path, self._url, error) from error
        if read != wanted:
            raise too_short(self._path, self._url, offset, wanted, offset + read)

    def read_checked(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer of bytes as `read_into` does, and return the CRC-32 of what was read."""
        size, crc = buffer.nbytes, 0
        if offset < 0 or offset + size > self.size:
            raise too_short(self._path, self._url, offset, size, self.size)
        with self._descriptor.use() as fd:
            for start in range(0, size, SLICE_BYTES):
                part = buffer[start : start + SLICE_BYTES]
                try:
                    read = transfer_all(os.preadv, fd, offset + start, [part])
                except OSError as error:
                    raise storage_error("read", self._path, self._url, error) from error
                if read != part.nbytes:
                    raise too_short(self._path, self._url, offset, size, offset + start + read)
                crc = zlib.crc32(part, crc)
        return crc

    def close(self) -> None:
        """Close the file; see Source.close."""
        self._descriptor.close()
