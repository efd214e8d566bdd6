"""A storage on everything that fsspec knows: memory, S3, Google and Azure object stores, HDFS, SFTP, ...

A file is one stream from front to back; a small file is one object write. Requests are tried again after transient
errors. A stream is not: its parts are retried by the client, and if that fails, the save fails.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from ..errors import CheckpointError, FormatError
from .failures import storage_error, too_short
from .interface import Entry, as_bytes, check_folder_to_remove, check_new_path, check_path, is_temporary
from .retry import Retry, ShortReadError, is_transient

T = TypeVar("T")

FLAT = {
    "abfs", "abfss", "adl", "az", "cos", "gcs", "gs", "hf", "memory", "obs", "oci", "oss", "r2", "s3", "s3a", "swift",
    "tos",
}  # fmt: skip
"""File systems without folders: they need none, and some would take makedirs as a wish for a new bucket."""

MAGIC = re.compile(r"[*?\[\]{}]")
"""Characters that fsspec's `rm` takes as a pattern."""

READ_BLOCK = 16 << 20
"""Bytes of one request: what a read needs besides the buffers that it fills."""

TIMES = ("LastModified", "mtime", "last_modified", "updated", "modified", "timeModified", "created")
"""Names under which backends tell when an object was last written."""


class FsspecStorage:
    """A folder of any file system that fsspec knows.

    Args:
        url: such as `s3://bucket/run` or `memory://run`.
        retries: how often a request is tried again after a transient error; or a `Retry`.
        concurrency: requests at a time; more threads wait.
        options: for the file system, as in `fsspec.filesystem`; credentials come from where its client looks.

    Raises:
        ModuleNotFoundError: fsspec or the client for this scheme is not installed.
        ValueError: fsspec does not know the scheme.
    """

    random_write = False

    def __init__(self, url: str, *, retries: int | Retry = 5, concurrency: int = 16, **options: Any) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.url = url
        self.retry = retries if isinstance(retries, Retry) else Retry(retries)
        self.fs, root = fsspec.core.url_to_fs(url, **options)
        self.root = root.rstrip("/")
        # One place has several URLs; but a chain of file systems names only the outer one.
        self.identity: str = url if "::" in url or options else self.fs.unstrip_protocol(self.root)
        """See `identity_of`."""
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self._makes_folders = not protocols & FLAT
        self._slots = threading.BoundedSemaphore(concurrency)

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    # ---- files

    def create(self, path: str) -> FsspecSink:
        """Begin a new object, which appears when it is closed; see Storage.create.

        Whether the name is taken is looked up once: of two writers that begin at the same time the last one wins.
        """
        full = self._full(check_new_path(path))
        with self._told("create", path):
            self._refuse_taken(path, full)
            self._folder_above(full)
            file = self._request(lambda: self.fs.open(full, "wb"))
        return FsspecSink(file, full, path, self)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small object in one request; see Storage.put.

        Exclusive is as strong as the backend: S3 and Google do it on the server with recent clients; elsewhere the
        name is looked up first, and of two writers at the same time the last one wins.
        """
        full = self._full(check_new_path(path))
        failed = False

        def attempt() -> None:
            nonlocal failed
            try:
                if exclusive:
                    self._refuse_taken(path, full)
                    self.fs.pipe_file(full, data, **self._create_mode())
                else:
                    self.fs.pipe_file(full, data)
            except FileExistsError:
                # A try whose answer was lost may have done it.
                if not failed or self.fs.cat_file(full) != data:
                    raise
            except Exception:
                failed = True
                raise

        with self._told("write", path, len(data)):
            self._folder_above(full)
            self._request(attempt)

    def _create_mode(self) -> dict[str, str]:
        """Return how to ask for an exclusive write, where this version of the client has a way."""
        import inspect

        return {"mode": "create"} if "mode" in inspect.signature(self.fs.pipe_file).parameters else {}

    def _refuse_taken(self, path: str, full: str) -> None:
        self.fs.invalidate_cache(full)
        if self.fs.exists(full):
            raise FileExistsError(f"{path!r} exists in {self.url}, and is not to be replaced")

    def get(self, path: str, limit: int) -> bytes:
        """Read a small object; see Storage.get."""
        full = self._full(check_path(path))
        with self._told("read", path):
            size = self._size(full)
            data: bytes = self._request(lambda: self.fs.cat_file(full)) if 0 < size <= limit else b""
        if max(size, len(data)) > limit:
            raise FormatError(
                f"{path!r} in {self.url} has {max(size, len(data))} bytes, but a file of its kind has {limit} at most; "
                "it is damaged or not what it claims to be"
            )
        return data

    def open(self, path: str) -> FsspecSource:
        """Open an object for reading; see Storage.open."""
        full = self._full(check_path(path))
        with self._told("open", path):
            return FsspecSource(self._size(full), full, path, self)

    def _size(self, full: str) -> int:
        def ask() -> dict[str, Any]:
            self.fs.invalidate_cache(full)
            about: dict[str, Any] = self.fs.info(full)
            return about

        about = self._request(ask)
        if about.get("type") == "directory":
            raise IsADirectoryError(f"{full!r} is a folder")
        if not isinstance(about.get("size"), int):
            raise OSError(f"the file system does not tell the size of {full!r}")
        return int(about["size"])

    def remove(self, path: str) -> None:
        """Remove an object; see Storage.remove."""
        full = self._full(check_path(path))
        with self._told("remove", path), contextlib.suppress(FileNotFoundError):
            self._request(lambda: self.fs.rm_file(full))

    # ---- folders

    def list(self, folder: str, *, temporary: bool = False) -> list[Entry]:
        """List what lies under a prefix; see Storage.list."""
        full = self._full(check_path(folder, folder=True))

        def ask() -> list[dict[str, Any]]:
            self.fs.invalidate_cache(full)
            try:
                found: list[dict[str, Any]] = self.fs.ls(full, detail=True)
            except FileNotFoundError:
                found = []
            return found

        with self._told("list", folder):
            found = self._request(ask)
        entries = {}
        for about in found:
            above, _, name = about["name"].rstrip("/").rpartition("/")
            # Some clients list the marker object of an empty folder as if it lay in itself.
            if name and above.strip("/") == full.strip("/") and (temporary or not is_temporary(name)):
                is_folder = about.get("type") == "directory"
                size = 0 if is_folder else int(about.get("size") or 0)
                entries[name] = Entry(name, is_folder, size, _modified(about))
        return [entries[name] for name in sorted(entries)]

    def remove_folder(self, folder: str) -> None:
        """Remove all objects under a prefix; see Storage.remove_folder."""
        full = self._full(check_folder_to_remove(folder))

        def remove() -> None:
            self.fs.invalidate_cache(full)
            if not self.fs.exists(full):
                return
            if not MAGIC.search(full):
                self.fs.rm(full, recursive=True)
                return
            for name, about in sorted(self.fs.find(full, withdirs=True, detail=True).items(), reverse=True):
                if about.get("type") == "directory":
                    self.fs.rmdir(name)
                else:
                    self.fs.rm_file(name)

        with self._told("remove", folder):
            # Another rank may be removing the same folder: go on with what is left.
            for _ in range(100):
                with contextlib.suppress(FileNotFoundError):
                    self._request(remove)
                    return
            raise OSError("others keep changing the folder")

    def sync(self, folder: str) -> None:
        """Do nothing: an object store answers when an object is durable; see Storage.sync."""
        check_path(folder, folder=True)

    def free_bytes(self) -> int | None:
        """Return None: object stores have no end."""
        return None

    # ---- inside

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _folder_above(self, full: str) -> None:
        if self._makes_folders:
            self._request(lambda: self.fs.makedirs(full.rpartition("/")[0], exist_ok=True))

    def _request(self, action: Callable[[], T]) -> T:
        def in_a_slot() -> T:
            with self._slots:
                return action()

        return self.retry(in_a_slot)

    @contextlib.contextmanager
    def _told(self, action: str, path: str, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            made = storage_error(action, path, self.url, error, needed=needed)
            if is_transient(error):
                made.args = (f"{made} (tried {self.retry.retries + 1} times)",)
            raise made from error


class FsspecSink:
    """A new object of a FsspecStorage; see Sink."""

    def __init__(self, file: Any, full: str, path: str, storage: FsspecStorage) -> None:
        self._file = file
        self._full = full
        self._path = path
        self._storage = storage
        self._at = 0

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Append buffers; see Sink.write."""
        if offset != self._at:
            raise ValueError(
                f"{self._path!r} in {self._storage.url} is written from front to back: the next byte is {self._at}, "
                f"but offset is {offset}; write in order (random_write is False)"
            )
        views = as_bytes(buffers)
        needed = sum(view.nbytes for view in views)
        with self._storage._told("write", self._path, needed), self._storage._slots:
            for view in views:
                while view.nbytes:
                    taken = self._file.write(view)
                    # Buffered streams take all and some return None for it; raw ones may take a part.
                    view = view[taken if isinstance(taken, int) and taken > 0 else view.nbytes :]
        self._at += needed

    def close(self) -> None:
        """Finish the object, which makes it appear; see Sink.close."""
        with self._storage._told("finish", self._path), self._storage._slots:
            self._file.close()

    def abort(self) -> None:
        """Drop the object and the parts that were sent; see Sink.abort."""
        with self._storage._told("remove", self._path):
            self._drop_parts()
        self._storage.remove(self._path)

    def _drop_parts(self) -> None:
        from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

        if self._file.closed:
            return
        if isinstance(self._file, AbstractBufferedFile):
            # A close would make the object appear; and it would come by itself when the file is forgotten.
            try:
                self._file.discard()
            finally:
                self._file.closed = True
        else:
            self._file.close()


class FsspecSource:
    """An object of a FsspecStorage that is read by ranges; see Source."""

    def __init__(self, size: int, full: str, path: str, storage: FsspecStorage) -> None:
        self.size = size
        self._full = full
        self._path = path
        self._storage = storage

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes from an offset on, one request for each 16 MiB; see Source.read_into."""
        views = as_bytes(buffers)
        wanted = sum(view.nbytes for view in views)
        if offset < 0 or offset + wanted > self.size:
            raise too_short(self._path, self._storage.url, offset, wanted, self.size)
        end = offset + wanted
        data = memoryview(b"")
        for view in views:
            while view.nbytes:
                if not data.nbytes:
                    data = self._range(offset, min(offset + READ_BLOCK, end))
                    offset += data.nbytes
                count = min(view.nbytes, data.nbytes)
                view[:count] = data[:count]
                view, data = view[count:], data[count:]

    def _range(self, start: int, stop: int) -> memoryview:
        def ask() -> bytes:
            data: bytes = self._storage.fs.cat_file(self._full, start=start, end=stop)
            if len(data) != stop - start:
                raise ShortReadError(f"{len(data)} bytes came for the range {start} to {stop}")
            return data

        with self._storage._told("read", self._path):
            try:
                return memoryview(self._storage._request(ask))
            except ShortReadError as error:
                raise too_short(self._path, self._storage.url, start, stop - start, self.size) from error

    def close(self) -> None:
        """Do nothing: each read is a request of its own."""


def _modified(about: dict[str, Any]) -> float | None:
    for key in TIMES:
        value = about.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
