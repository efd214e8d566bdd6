"""The data files of one writer: packs that chunks are appended to, or safetensors files with a fixed place for each."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .._format import FileRecord, data_path
from .._storage import Sink, Storage

__all__ = ["Packs"]

Buffers = Sequence[memoryview]


class Packs:
    """Files `data/w00003-0.pack`, `-1.pack`, ...: the next one begins when one is full. Threads may append at once."""

    def __init__(self, storage: Storage, folder: str, writer: int, limit: int) -> None:
        """Take the storage, the step's folder, the writer, and the bytes after which another file begins."""
        self._storage, self._folder, self._writer, self._limit = storage, folder, writer, limit
        self._lock = threading.Lock()
        self._sinks: list[Sink] = []
        self._sizes: list[int] = []

    def append(self, row: int, buffers: Buffers) -> tuple[int, int]:
        """Write the bytes of chunk `row` and its neighbours; return (number of the file, offset of the first byte)."""
        size = sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            if not self._sinks or (self._sizes[-1] and self._sizes[-1] + size > self._limit):
                self._sinks.append(self._storage.create(self._path(len(self._sinks))))
                self._sizes.append(0)
            number, offset = len(self._sinks) - 1, self._sizes[-1]
            self._sizes[number] += size
            sink = self._sinks[number]
            if not self._storage.random_write:  # a stream takes its bytes in order
                sink.write(offset, buffers)
        if self._storage.random_write:
            sink.write(offset, buffers)
        return number, offset

    def close(self) -> None:
        """Make all files durable."""
        for sink in self._sinks:
            sink.close()

    def abort(self) -> None:
        """Remove all files."""
        for sink in self._sinks:
            sink.abort()

    def records(self) -> list[FileRecord]:
        """Return the files as an index lists them."""
        return [FileRecord(self._path(number), size) for number, size in enumerate(self._sizes)]

    def _path(self, number: int) -> str:
        return data_path(self._folder, self._writer, number)
