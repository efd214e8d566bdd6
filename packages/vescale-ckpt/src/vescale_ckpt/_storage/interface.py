"""Which paths a place for checkpoints takes, and what all storages share; `protocols` says what one must do.

Small files are put whole or not at all, data files are written once and never changed. There is no rename: an
object store can do all of this, and a checkpoint is there when its last small file is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import FormatError
from ..protocols import Entry, Sink, Source, Storage

__all__ = [
    "MAX_NAME",
    "MAX_PATH",
    "TEMPORARY",
    "Entry",
    "Sink",
    "Source",
    "Storage",
    "as_bytes",
    "check_folder_to_remove",
    "check_new_path",
    "check_path",
    "identity_of",
    "is_temporary",
    "leftovers",
]

TEMPORARY = ".tmp-"
"""Names that begin with this are files of a `put` that has not finished; nothing else may be called so."""

MAX_NAME = 255
"""Bytes that one name in a path may have, on every common file system."""

MAX_PATH = 1024
"""Bytes that a whole path may have: the length of a key on S3."""


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
