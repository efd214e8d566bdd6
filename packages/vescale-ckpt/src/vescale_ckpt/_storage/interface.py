"""What a place for checkpoints must do, and which paths it takes.

Small files are put whole or not at all, data files are written once and never changed. There is no rename: an
object store can do all of this, and a checkpoint is there when its last small file is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import FormatError

TEMPORARY = ".tmp-"
"""Names that begin with this are files of a `put` that has not finished; nothing else may be called so."""

MAX_NAME = 255
"""Bytes that one name in a path may have, on every common file system."""

MAX_PATH = 1024
"""Bytes that a whole path may have: the length of a key on S3."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    """Without the folder."""
    is_folder: bool
    """Whether it holds other entries; object stores make folders up from the names of objects."""
    size: int
    """Bytes; 0 for a folder."""
    modified: float | None
    """Unix seconds of the last change, by the clock of the storage; None where that is not known."""


@runtime_checkable
class Sink(Protocol):
    """A data file while it is written."""

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write buffers one after the other, all of them.

        Args:
            offset: byte of the file where the first buffer goes. Where the storage has no random write, it must be
                the number of bytes that were written before.
            buffers: C-contiguous memory. Threads may write at the same time where the storage has random write.

        Raises:
            StorageError: the bytes could not be written; the file is of no use any more, abort it.
            ValueError: an offset that leaves a gap, where the storage has no random write.
        """

    def close(self) -> None:
        """Finish the file. Its bytes survive a loss of power when this returns; its name does after `sync`."""

    def abort(self) -> None:
        """Drop the file: no file remains, whether it was closed or not."""


@runtime_checkable
class Source(Protocol):
    """A data file that is read; all methods may be called by several threads.

    One that has `read_checked(offset, buffer) -> int` is asked by it for what has a checksum: it fills the buffer of
    bytes as `read_into` does, and returns the CRC-32 of what it read, which costs less on the way than later.
    """

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers one after the other with the bytes that begin at `offset`.

        Args:
            offset: byte of the file.
            buffers: C-contiguous writable memory.

        Raises:
            CorruptionError: the file ends before.
            StorageError: the storage failed.
        """

    def close(self) -> None:
        """Give back what the open file holds; waits for reads that run."""


@runtime_checkable
class Storage(Protocol):
    """A place that keeps files under paths like `steps/1/COMMIT`, relative to its root.

    What goes wrong is raised as StorageError, which is also an OSError with `errno` where one is known;
    FileNotFoundError and FileExistsError pass as they are. Methods may be called by several threads.
    """

    @property
    def url(self) -> str:
        """The root, for messages; and what tells places apart, unless there is an `identity`, see `identity_of`."""

    @property
    def random_write(self) -> bool:
        """Whether a data file may be written at any offset and by several threads; else only front to back."""

    def create(self, path: str) -> Sink:
        """Begin a new data file; folders are made as needed.

        Raises:
            FileExistsError: the name is taken.
            StorageError: the storage failed.
        """

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small file whole or not at all; it and its name survive a loss of power when this returns.

        Args:
            path: replaced where it exists.
            data: content.
            exclusive: never replace.

        Raises:
            FileExistsError: `exclusive`, and the name is taken.
            StorageError: the storage failed.
        """

    def get(self, path: str, limit: int) -> bytes:
        """Read a small file.

        Args:
            path: of the file.
            limit: bytes that the file may have at most.

        Raises:
            FileNotFoundError: there is none.
            FormatError: it is longer than `limit`.
            StorageError: the storage failed.
        """

    def open(self, path: str) -> Source:
        """Open a data file for reading.

        Raises:
            FileNotFoundError: there is none.
            StorageError: the storage failed.
        """

    def list(self, folder: str, *, temporary: bool = False) -> list[Entry]:
        """List a folder.

        Args:
            folder: its path; "" for the root.
            temporary: list also the files of puts that have not finished, or never will.

        Returns:
            Entries sorted by name; none if the folder is absent. Links that lead out of the root are left out.

        Raises:
            StorageError: the storage failed, or the path is a file.
        """

    def remove(self, path: str) -> None:
        """Remove a file; absent is fine. After a loss of power it may be back unless `sync` was called."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it; absent is fine. It must not be the root."""

    def sync(self, folder: str) -> None:
        """Make what was created and removed in a folder survive a loss of power; absent is fine."""

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written; None where that is not known."""


def identity_of(storage: Storage) -> str:
    """Return a text that two storages of one process have in common if, and only if, they are the same place.

    It is the attribute `identity` of the storage where it has one, for storages whose `url` is not enough to tell:
    one in memory may have the url of another one, and a place may have several URLs.

    Example:
        >>> from vescale_ckpt.testing import MemoryStorage
        >>> identity_of(MemoryStorage("mine://run")) == identity_of(MemoryStorage("mine://run"))
        False
    """
    return str(getattr(storage, "identity", storage.url))


def check_path(path: str, *, folder: bool = False) -> str:
    """Return a path if it is one that stays below the root of a storage on every system.

    Args:
        path: names with "/" between them.
        folder: also take "", the root.

    Raises:
        FormatError: anything else; paths come from files that others may have written.

    Example:
        >>> check_path("steps/00000001-0f0f0f0f/COMMIT")
        'steps/00000001-0f0f0f0f/COMMIT'
        >>> check_path("steps/../../etc/passwd")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        vescale_ckpt.errors.FormatError: path 'steps/../../etc/passwd': the name '..' leads elsewhere; a path is ...
    """
    if not isinstance(path, str):
        raise FormatError(f"a path must be a str, but is a {type(path).__name__}")
    if path == "" and folder:
        return path
    reason = _fault(path)
    if reason:
        raise FormatError(f'path {path!r:.200}: {reason}; a path is made of plain names with "/" between them')
    return path


def _fault(path: str) -> str | None:
    if any(ord(c) < 32 or c in "\\\x7f" or 0xD800 <= ord(c) <= 0xDFFF for c in path):
        return "it has a backslash, a control character or half of a surrogate pair"
    if path.startswith("/"):
        return "it is absolute"
    if len(path.encode()) > MAX_PATH:
        return f"it has more than {MAX_PATH} bytes"
    for name in path.split("/"):
        if name == "":
            return "a name is empty"
        if name in (".", ".."):
            return f"the name {name!r} leads elsewhere"
        if len(name.encode()) > MAX_NAME:
            return f"a name has more than {MAX_NAME} bytes"
    return None


def check_new_path(path: str) -> str:
    """Return a path that may be written: one that `check_path` takes and that no unfinished `put` could own."""
    check_path(path)
    if is_temporary(path.rpartition("/")[2]):
        raise FormatError(f"path {path!r}: names that begin with {TEMPORARY!r} are those of unfinished writes")
    return path


def check_folder_to_remove(folder: str) -> str:
    """Return the path of a folder that may be removed whole: any but the root."""
    if folder == "":
        raise FormatError('folder "" is the root of the storage, which is never removed; remove the folders in it')
    return check_path(folder)


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of an unfinished `put`."""
    return name.startswith(TEMPORARY)


def leftovers(storage: Storage, folder: str = "") -> Iterator[tuple[str, Entry]]:
    """Find the files of puts that have not finished, below a folder.

    A put that runs just now has one too: remove those that are older than any put could take.

    Args:
        storage: where to look.
        folder: its path; "" for everything.

    Yields:
        The path, which `remove` takes, and the entry, which tells the age.
    """
    for entry in storage.list(folder, temporary=True):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            yield from leftovers(storage, path)
        elif is_temporary(entry.name):
            yield path, entry


def as_bytes(buffers: Sequence[memoryview | bytes]) -> list[memoryview]:
    """Return buffers of any item type as views of bytes, without the empty ones."""
    views = [memoryview(buffer) for buffer in buffers]
    # The cast refuses what is not C-contiguous.
    return [view.cast("B") for view in views if view.nbytes]
