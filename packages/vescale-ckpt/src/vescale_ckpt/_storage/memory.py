"""A storage in memory that behaves like a folder or like an object store: for tests, and for nothing else."""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import FormatError, StorageError
from .failures import storage_error, too_short
from .interface import TEMPORARY, Entry, as_bytes, check_folder_to_remove, check_new_path, check_path, is_temporary

_numbers = itertools.count(1)


class MemoryStorage:
    """Files in a dict, for tests; safe to use from several threads.

    A folder exists while there is a file below it.

    Args:
        url: for messages; None: one that no other storage has.
        random_write: True: like a local folder, where a file is seen while it is written, at any offset. False: like
            an object store, where it is written from front to back and appears when it is closed.
        capacity: bytes that all files may have together; more is ENOSPC.
        clock: Unix seconds for `Entry.modified`.
        files: what is there at the beginning.

    Example:
        >>> storage = MemoryStorage(random_write=False)
        >>> sink = storage.create("steps/1/data")
        >>> sink.write(0, [b"abc", b"de"])
        >>> storage.files()
        {}
        >>> sink.close()
        >>> storage.files()
        {'steps/1/data': b'abcde'}
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        random_write: bool = True,
        capacity: int | None = None,
        clock: Callable[[], float] = time.time,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        number = next(_numbers)
        self.url = f"testing://{number}" if url is None else url
        self.identity = f"MemoryStorage {number}"
        """Of these files alone, whatever the url; see `identity_of`."""
        self.random_write = random_write
        self.capacity = capacity
        self.clock = clock
        self._lock = threading.RLock()
        self._files: dict[str, bytearray] = {check_path(path): bytearray(data) for path, data in (files or {}).items()}
        self._modified: dict[str, float] = dict.fromkeys(self._files, clock())

    def __repr__(self) -> str:
        return f"MemoryStorage({self.url!r}, random_write={self.random_write})"

    # ---- for tests

    def files(self) -> dict[str, bytes]:
        """Return a copy of all files by path, sorted."""
        with self._lock:
            return {path: bytes(self._files[path]) for path in sorted(self._files)}

    def flip(self, path: str, bit: int) -> None:
        """Change one bit of a file: bit 0 is the lowest one of its first byte.

        Raises:
            FileNotFoundError: there is no such file.
            IndexError: the file ends before.
        """
        with self._lock:
            self._at(path)[bit // 8] ^= 1 << bit % 8

    def truncate(self, path: str, size: int) -> None:
        """Cut a file off after `size` bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._lock:
            del self._at(path)[size:]

    # ---- files

    def create(self, path: str) -> MemorySink:
        """Begin a new file; see Storage.create."""
        with self._lock:
            self._refuse_taken(check_new_path(path))
            self._check_folders(path)
            sink = MemorySink(path, self)
            if self.random_write:
                self._store(path, sink.data)
        return sink

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small file whole or not at all; see Storage.put."""
        with self._lock:
            check_new_path(path)
            if exclusive:
                self._refuse_taken(path)
            self._check_folders(path)
            self._reserve(path, len(data) - len(self._files.get(path, b"")))
            self._store(path, bytearray(data))

    def leave_temporary(self, folder: str, data: bytes = b"") -> str:
        """Leave what a put that was killed half-way leaves in a folder, and return its path."""
        path = f"{folder}/" * bool(folder) + f"{TEMPORARY}{secrets.token_hex(8)}"
        with self._lock:
            self._store(check_path(path), bytearray(data))
        return path

    def get(self, path: str, limit: int) -> bytes:
        """Read a small file; see Storage.get."""
        with self._lock:
            data = bytes(self._at(check_path(path)))
        if len(data) > limit:
            raise FormatError(f"{path!r} in {self.url} has {len(data)} bytes, but {limit} are allowed")
        return data

    def open(self, path: str) -> MemorySource:
        """Open a file for reading; see Storage.open."""
        with self._lock:
            return MemorySource(self._at(check_path(path)), path, self)

    def remove(self, path: str) -> None:
        """Remove a file; see Storage.remove."""
        with self._lock:
            if self._is_folder(check_path(path)):
                raise storage_error("remove", path, self.url, IsADirectoryError(errno.EISDIR, "Is a directory"))
            self._files.pop(path, None)

    # ---- folders

    def list(self, folder: str, *, temporary: bool = False) -> list[Entry]:
        """List a folder; see Storage.list."""
        prefix = f"{folder}/" if check_path(folder, folder=True) else ""
        found: dict[str, Entry] = {}
        with self._lock:
            if folder in self._files:
                raise storage_error("list", folder, self.url, NotADirectoryError(errno.ENOTDIR, "Not a directory"))
            for path, data in self._files.items():
                if path.startswith(prefix):
                    name, slash, _ = path[len(prefix) :].partition("/")
                    if temporary or not is_temporary(name):
                        modified = max(self._modified[path], (found[name].modified or 0) if name in found else 0)
                        found[name] = Entry(name, bool(slash), 0 if slash else len(data), modified)
        return [found[name] for name in sorted(found)]

    def remove_folder(self, folder: str) -> None:
        """Remove all files below a folder; see Storage.remove_folder."""
        check_folder_to_remove(folder)
        with self._lock:
            if folder in self._files:
                raise storage_error("remove", folder, self.url, NotADirectoryError(errno.ENOTDIR, "Not a directory"))
            for path in [path for path in self._files if path.startswith(f"{folder}/")]:
                del self._files[path]

    def sync(self, folder: str) -> None:
        """Do nothing; see Storage.sync."""
        check_path(folder, folder=True)

    def free_bytes(self) -> int | None:
        """Return what is left of `capacity`."""
        with self._lock:
            return None if self.capacity is None else self.capacity - sum(map(len, self._files.values()))

    # ---- inside; the lock is held

    def _at(self, path: str) -> bytearray:
        if path not in self._files:
            if self._is_folder(path):
                raise storage_error("open", path, self.url, IsADirectoryError(errno.EISDIR, "Is a directory"))
            raise FileNotFoundError(errno.ENOENT, "No such file", f"{self.url}/{path}")
        return self._files[path]

    def _store(self, path: str, data: bytearray) -> None:
        self._files[path] = data
        self._modified[path] = self.clock()

    def _is_folder(self, path: str) -> bool:
        return any(other.startswith(f"{path}/") for other in self._files)

    def _refuse_taken(self, path: str) -> None:
        if path in self._files or self._is_folder(path):
            raise FileExistsError(errno.EEXIST, "File exists", f"{self.url}/{path}")

    def _check_folders(self, path: str) -> None:
        parts = path.split("/")
        for count in range(1, len(parts)):
            if "/".join(parts[:count]) in self._files:
                raise storage_error("create", path, self.url, NotADirectoryError(errno.ENOTDIR, "Not a directory"))
        if self._is_folder(path):
            raise storage_error("write", path, self.url, IsADirectoryError(errno.EISDIR, "Is a directory"))

    def _reserve(self, path: str, more: int) -> None:
        free = self.free_bytes()
        if free is not None and more > free:
            error = OSError(errno.ENOSPC, "No space left on device")
            raise storage_error("write", path, self.url, error, needed=more)


class MemorySink:
    """A new file of a MemoryStorage; see Sink."""

    def __init__(self, path: str, storage: MemoryStorage) -> None:
        self.data = bytearray()
        self._path = path
        self._storage = storage
        self._closed = False

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write buffers one after the other; see Sink.write."""
        storage = self._storage
        data = b"".join(as_bytes(buffers))
        with storage._lock:
            if self._closed:
                raise ValueError(f"{self._path!r} is closed")
            if offset < 0 or (not storage.random_write and offset != len(self.data)):
                raise ValueError(f"{self._path!r}: offset is {offset}, but the file has {len(self.data)} bytes so far")
            gap = offset - len(self.data)
            more = max(0, gap + len(data))
            storage._reserve(self._path, more)
            self.data.extend(bytes(max(0, gap)))
            self.data[offset : offset + len(data)] = data

    def close(self) -> None:
        """Finish the file; see Sink.close."""
        storage = self._storage
        with storage._lock:
            if self._closed:
                return
            self._closed = True
            if not storage.random_write:
                storage._reserve(self._path, len(self.data))
                storage._store(self._path, self.data)
            elif self._path not in storage._files:
                raise StorageError(f"{self._path!r} in {storage.url} was removed while it was written")

    def abort(self) -> None:
        """Drop the file; see Sink.abort."""
        storage = self._storage
        with storage._lock:
            self._closed = True
            if storage._files.get(self._path) is self.data:
                del storage._files[self._path]


class MemorySource:
    """A file of a MemoryStorage that is read; see Source."""

    def __init__(self, data: bytearray, path: str, storage: MemoryStorage) -> None:
        self.size = len(data)
        self._data = data
        self._path = path
        self._storage = storage

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers one after the other; see Source.read_into."""
        views = as_bytes(buffers)
        wanted = sum(view.nbytes for view in views)
        with self._storage._lock:
            if offset < 0 or offset + wanted > min(self.size, len(self._data)):
                raise too_short(self._path, self._storage.url, offset, wanted, len(self._data))
            for view in views:
                view[:] = self._data[offset : offset + view.nbytes]
                offset += view.nbytes

    def close(self) -> None:
        """Do nothing."""
