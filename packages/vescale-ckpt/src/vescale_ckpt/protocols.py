"""What a plugin has to bring: the members of a codec, and of a storage with the files that it opens.

A plugin need not import or inherit from these: its objects are used by their members. docs/plugins.md has a codec and
a storage that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "Entry", "Sink", "Source", "Storage"]


@runtime_checkable
class Codec(Protocol):
    """Turns the bytes of a chunk into fewer bytes and back; used by many threads at a time.

    A tensor is stored in chunks of at most 1 MiB, and each is encoded by itself. All numbers are little-endian.
    """

    def encode(self, data: torch.Tensor, itemsize: int) -> Sequence[memoryview] | None:
        """Encode one chunk.

        Args:
            data: the chunk, at least one byte: 1-D contiguous uint8 on the CPU; not to be changed, nor kept.
            itemsize: bytes of one number of the tensor: 1, 2, 4 or 8 (a complex element is two numbers). The chunk
                need not end with a whole one.

        Returns:
            The bytes to store: C-contiguous memoryviews (or bytes), one after the other in the file, valid until the
            next call on the same thread. None: they would not be fewer, so the chunk is to be stored as it is; that is
            also what happens to more bytes than the chunk has.
        """

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None:
        """Decode one chunk into `out`. Must not allocate by a number in the data: files may come from anywhere.

        Args:
            stored: what `encode` returned, as one run of bytes; not trusted.
            out: 1-D contiguous uint8 on the CPU, as long as the chunk was; to be filled, all of it.
            itemsize: as at `encode`.

        Raises:
            Exception: any error says that `stored` is not what `encode` can have made of a chunk of this size; it
                reaches the caller as a CorruptionError that names the codec and the tensor.
        """


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
