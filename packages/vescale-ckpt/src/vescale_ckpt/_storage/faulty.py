"""A storage around another one that fails, tears, waits or dies at the operation that a plan names.

When it dies it can also lose what no fsync has covered, as a loss of power does: bytes of files that were not closed,
names in folders that were not synced, and removals in them. The inner storage then holds what a new process finds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from ..errors import StorageError
from .failures import storage_error
from .faults import Fail, Fault, Kill, Killed, Operation, Plan, Slow, Tear
from .interface import TEMPORARY, Entry, Sink, Source, Storage, as_bytes, identity_of


class FaultyStorage:
    """Count the operations of a storage and let some of them go wrong; for tests.

    Operations of several threads are done one at a time, in the order in which they are counted.

    Args:
        inner: the storage that does the work.
        plan: tells what goes wrong at an operation; None for nothing.
        power_loss: a `Kill` also loses what was not made durable: bytes of files that were not closed, and creations
            and removals in folders that were not synced after. Without it only the process dies.
        survives: with `power_loss`, asked with the path of each file that may lose something, whether it does not:
            a device may have kept any subset.

    Example:
        Try a program with a crash at each of its operations:

        >>> from vescale_ckpt.testing import FaultyStorage, Kill, Killed, MemoryStorage, at
        >>> def program(storage):
        ...     storage.put("a", b"1")
        ...     storage.put("b", b"2")
        >>> whole = FaultyStorage(MemoryStorage())
        >>> program(whole)
        >>> for k in range(whole.count):
        ...     inner = MemoryStorage()
        ...     try:
        ...         program(FaultyStorage(inner, at({k: Kill()})))
        ...     except Killed:
        ...         print(inner.files())
        {}
        {'a': b'1'}
    """

    def __init__(
        self,
        inner: Storage,
        plan: Plan | None = None,
        *,
        power_loss: bool = False,
        survives: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self.inner = inner
        self.operations: list[Operation] = []
        """All operations so far; those after death are not counted."""
        self.dead = False
        self._plan = plan
        self._power_loss = power_loss
        self._survives = survives
        self._lock = threading.RLock()
        self._open: dict[str, FaultySink] = {}
        self._unsynced: set[str] = set()
        """Files that were created since their folder was synced."""
        self._removed: dict[str, tuple[str, bytes]] = {}
        """Files that were removed: the folder that was not synced since, and what was in them."""

    @property
    def url(self) -> str:
        """The root of the inner storage."""
        return self.inner.url

    @property
    def identity(self) -> str:
        """That of the inner storage."""
        return identity_of(self.inner)

    @property
    def random_write(self) -> bool:
        """As the inner storage."""
        return self.inner.random_write

    @property
    def count(self) -> int:
        """Number of operations so far."""
        return len(self.operations)

    # ---- files

    def create(self, path: str) -> FaultySink:
        """Begin a new file; see Storage.create."""
        with self._lock:
            fault = self._next("create", path)
            self._before(fault, path)
            sink = FaultySink(path, self.inner.create(path), self)
            self._open[path] = sink
            self._unsynced.add(path)
            self._after(fault)
        return sink

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small file whole or not at all; see Storage.put."""
        with self._lock:
            fault = self._next("put", path, len(data))
            if isinstance(fault, Kill) and 0.5 <= fault.part < 1 and self.inner.random_write:
                self._leave_temporary(path, data)
            self._before(fault, path, len(data))
            self.inner.put(path, data, exclusive=exclusive)
            # Flushing the folder for this name flushes all other names in it.
            self._settle(os.path.dirname(path))
            self._after(fault)

    def get(self, path: str, limit: int) -> bytes:
        """Read a small file; see Storage.get."""
        with self._lock:
            self._read_only("get", path)
            return self.inner.get(path, limit)

    def open(self, path: str) -> FaultySource:
        """Open a file for reading; see Storage.open."""
        with self._lock:
            self._read_only("open", path)
            return FaultySource(path, self.inner.open(path), self)

    def remove(self, path: str) -> None:
        """Remove a file; see Storage.remove."""
        with self._lock:
            fault = self._next("remove", path)
            self._before(fault, path)
            self._remove(path)
            self._after(fault)

    # ---- folders

    def list(self, folder: str, *, temporary: bool = False) -> list[Entry]:
        """List a folder; see Storage.list."""
        with self._lock:
            self._read_only("list", folder)
            return self.inner.list(folder, temporary=temporary)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all in it; see Storage.remove_folder."""
        with self._lock:
            fault = self._next("remove_folder", folder)
            if isinstance(fault, Kill) and fault.part < 1:
                paths = self._files_below(folder)
                for path in paths[: int(len(paths) * fault.part)]:
                    self._remove(path)
            self._before(fault, folder)
            for path in self._files_below(folder):
                self._remove(path)
            self.inner.remove_folder(folder)
            # The folder itself is a name in the one above: once that is synced, nothing in it can come back.
            above = os.path.dirname(folder)
            for path, (_, data) in self._removed.items():
                if path.startswith(f"{folder}/"):
                    self._removed[path] = (above, data)
            self._after(fault)

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable; see Storage.sync."""
        with self._lock:
            fault = self._next("sync", folder)
            self._before(fault, folder)
            self.inner.sync(folder)
            self._settle(folder)
            self._after(fault)

    def free_bytes(self) -> int | None:
        """Return what the inner storage says; not counted."""
        return self.inner.free_bytes()

    # ---- the plan; the lock is held

    def _next(self, kind: str, path: str, nbytes: int = 0) -> Fault | None:
        if self.dead:
            raise Killed(f"{kind} of {path!r} after the process died")
        operation = Operation(len(self.operations), kind, path, nbytes)
        self.operations.append(operation)
        fault = self._plan(operation) if self._plan else None
        if isinstance(fault, Slow):
            # Let other threads go on meanwhile; the lock is held once, by a public method.
            self._lock.release()
            try:
                fault.wait()
            finally:
                self._lock.acquire()
            if self.dead:
                raise Killed(f"{kind} of {path!r} after the process died")
        return fault

    def _before(self, fault: Fault | None, path: str, needed: int | None = None) -> None:
        if isinstance(fault, Fail):
            raise self._error(fault, path, needed)
        if isinstance(fault, Kill) and fault.part < 1:
            self._die()

    def _after(self, fault: Fault | None) -> None:
        if isinstance(fault, Kill):
            self._die()

    def _read_only(self, kind: str, path: str, nbytes: int = 0) -> None:
        self._before(self._next(kind, path, nbytes), path)

    def _error(self, fault: Fail, path: str, needed: int | None) -> StorageError:
        kind = self.operations[-1].kind
        error = OSError(fault.code, f"{os.strerror(fault.code)} (made for a test)")
        return storage_error(kind, path, self.url, error, needed=needed)

    # ---- what a loss of power would undo; the lock is held

    def _settle(self, folder: str) -> None:
        """Note that creations and removals of names in a folder are durable."""
        self._unsynced = {path for path in self._unsynced if os.path.dirname(path) != folder}
        self._removed = {path: about for path, about in self._removed.items() if about[0] != folder}

    def _remove(self, path: str) -> None:
        if self._power_loss and self.inner.random_write and path not in self._unsynced and self._exists(path):
            self._removed[path] = (os.path.dirname(path), self._content(path))
        self.inner.remove(path)
        self._unsynced.discard(path)

    def _files_below(self, folder: str) -> Sequence[str]:
        paths: Sequence[str] = []
        for entry in self.inner.list(folder, temporary=True):
            path = f"{folder}/{entry.name}"
            paths = [*paths, *(self._files_below(path) if entry.is_folder else [path])]
        return paths

    def _content(self, path: str) -> bytes:
        source = self.inner.open(path)
        try:
            data = bytearray(source.size)
            source.read_into(0, [memoryview(data)])
            return bytes(data)
        finally:
            source.close()

    def _leave_temporary(self, path: str, data: bytes) -> None:
        """Leave what a put leaves that is killed between its write and its rename."""
        folder = os.path.dirname(path)
        name = f"{TEMPORARY}{len(self.operations):016x}"
        full = f"{folder}/{name}" if folder else name
        leave = getattr(self.inner, "leave_temporary", None)
        if leave is not None:
            leave(folder, data[: len(data) // 2])
        elif root := getattr(self.inner, "root", None):
            os.makedirs(os.path.dirname(os.path.join(root, full)), exist_ok=True)
            with open(os.path.join(root, full), "wb") as file:
                file.write(data[: len(data) // 2])

    def _die(self) -> None:
        self.dead = True
        for path, sink in sorted(self._open.items()):
            self._leave_open_file(path, sink)
        if self._power_loss and self.inner.random_write:
            for path in sorted(self._unsynced - self._open.keys()):
                if not self._survives(path):
                    self.inner.remove(path)
            for path, (_, data) in sorted(self._removed.items()):
                if not self._survives(path) and not self._exists(path):
                    self._restore(path, data)
        raise Killed(f"at operation {self.operations[-1]}")

    def _leave_open_file(self, path: str, sink: FaultySink) -> None:
        """Leave what remains of a file that was not closed: the kernel's copy, a part of it, or nothing."""
        if not self.inner.random_write or not self._exists(path):
            sink.inner.abort()
            return
        data = self._content(path)
        sink.inner.abort()
        if self._power_loss and not self._survives(path):
            if path in self._unsynced:
                return
            data = data[: len(data) // 2]
        self._restore(path, data)

    def _restore(self, path: str, data: bytes) -> None:
        sink = self.inner.create(path)
        sink.write(0, [data])
        sink.close()

    def _exists(self, path: str) -> bool:
        try:
            self.inner.open(path).close()
        except FileNotFoundError:
            return False
        return True


class FaultySink:
    """A new file of a FaultyStorage; see Sink."""

    def __init__(self, path: str, inner: Sink, storage: FaultyStorage) -> None:
        self.inner = inner
        self._path = path
        self._storage = storage

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write buffers one after the other; see Sink.write."""
        storage = self._storage
        data = b"".join(as_bytes(buffers))
        with storage._lock:
            fault = storage._next("write", self._path, len(data))
            if isinstance(fault, Fail | Tear | Kill):
                count = int(len(data) * fault.part)
                if isinstance(fault, Tear):
                    data = data[:count] + bytes(len(data) - count)
                else:
                    self.inner.write(offset, [data[:count]])
                    storage._before(fault, self._path, len(data) - count)
            if not isinstance(fault, Kill):
                self.inner.write(offset, [data])
            storage._after(fault)

    def close(self) -> None:
        """Finish the file; see Sink.close."""
        storage = self._storage
        with storage._lock:
            fault = storage._next("close", self._path)
            storage._before(fault, self._path)
            self.inner.close()
            storage._open.pop(self._path, None)
            storage._after(fault)

    def abort(self) -> None:
        """Drop the file; see Sink.abort."""
        storage = self._storage
        with storage._lock:
            fault = storage._next("abort", self._path)
            # A file that cannot be removed is closed all the same, as the process goes on.
            storage._before(fault, self._path)
            self.inner.abort()
            storage._open.pop(self._path, None)
            storage._unsynced.discard(self._path)
            storage._after(fault)


class FaultySource:
    """A file of a FaultyStorage that is read; see Source."""

    def __init__(self, path: str, inner: Source, storage: FaultyStorage) -> None:
        self.size = inner.size
        self._inner = inner
        self._path = path
        self._storage = storage

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers one after the other; see Source.read_into."""
        storage = self._storage
        with storage._lock:
            storage._read_only("read", self._path, sum(memoryview(buffer).nbytes for buffer in buffers))
            self._inner.read_into(offset, buffers)

    def close(self) -> None:
        """Close the file; not counted."""
        self._inner.close()
