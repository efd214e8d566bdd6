"""Chunks that are named by what they hold, shared by all steps of a store: `chunks/ab/ab12...`.

Such a file says itself how it is encoded: 16 bytes with the name of the codec, then the encoded chunk. So a chunk that
somebody else has written can be used whatever that save's options were.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .. import _codec
from .._format import FileRecord, chunk_path
from .._storage import Storage
from ..errors import FormatError

__all__ = ["HEADER", "ContentStore"]

HEADER = 16
"""Bytes before the encoded chunk."""


class ContentStore:
    """Puts chunks under the SHA-256 of their raw bytes, each once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._known: dict[str, tuple[FileRecord, str | None]] = {}
        self._own: set[str] = set()

    def find(self, raw: memoryview) -> tuple[str, tuple[FileRecord, str | None] | None]:
        """Return the path of a chunk and, if it is there, its file and the codec that it is encoded with."""
        path = chunk_path(_codec.sha256(raw))
        with self._lock:
            known = self._known.get(path)
        if known is None:
            known = self._read(path)
            if known is not None:
                with self._lock:
                    self._known[path] = known
        return path, known

    def put(self, path: str, codec: str | None, buffers: Sequence[memoryview]) -> tuple[FileRecord, str | None, bool]:
        """Store a chunk; return its file, its codec, and whether it was written now.

        If another writer was faster, its file is taken as it is.
        """
        data = b"".join([(codec or "raw").encode().ljust(HEADER), *buffers])
        try:
            self._storage.put(path, data, exclusive=True)
        except FileExistsError:
            found = self._read(path)
            if found is None:  # removed in between: nobody but a wrong garbage collection does that
                self._storage.put(path, data)
            else:
                return (*found, False)
        with self._lock:
            self._known[path] = FileRecord(path, len(data)), codec
        return FileRecord(path, len(data)), codec, True

    def lost(self) -> list[str]:
        """Return the paths that were used here and are not there any more."""
        return sorted(path for path in self._known if self._read(path) is None)

    def _read(self, path: str) -> tuple[FileRecord, str | None] | None:
        try:
            source = self._storage.open(path)
        except FileNotFoundError:
            return None
        try:
            header = bytearray(HEADER)
            if source.size < HEADER:
                raise FormatError(f"{path}: {source.size} bytes are too short for a chunk; run `vescale-ckpt verify`.")
            source.read_into(0, [memoryview(header)])
            name = header.decode("ascii", "replace").rstrip()
        finally:
            source.close()
        if name == "raw":
            return FileRecord(path, source.size), None
        try:
            _codec.codec(name)
        except FormatError as error:  # a step that refers to it could not be read
            raise FormatError(
                f"{path}: holds a chunk of this save, encoded in a way that cannot be used: {error}. `vescale-ckpt "
                'verify` tells which steps are damaged; without dedup="content" the save writes a chunk of its own.'
            ) from error
        return FileRecord(path, source.size), name
