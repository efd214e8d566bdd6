"""The chunk table of a writer: seven columns of machine integers, 41 bytes a row, in JSON 55.

Rows are plain numbers to the table itself; what they mean for files and pieces is checked by the index.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import FormatError
from .fields import Fields, encode
from .jsonio import refuse
from .limits import CHUNK_BYTES, UINT63

__all__ = ["FINGERPRINT_BYTES", "Chunk", "ChunkTable", "FileRecord"]

FINGERPRINT_BYTES = 16
_KEYS = "count file offset stored raw codec crc fingerprint"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A data file that chunks lie in."""

    path: str
    """Relative to the store."""
    bytes: int
    """Its size."""


class Chunk(NamedTuple):
    """One row."""

    file: int
    """Number of the file in the index."""
    offset: int
    """First byte in the file."""
    stored: int
    """Bytes in the file."""
    raw: int
    """Bytes of the tensor."""
    codec: int
    """0: stored as they are; else the codec's place in the index, counted from 1."""
    crc: int
    """CRC-32 of the raw bytes."""
    fingerprint: bytes
    """16 bytes that tell whether the chunk changed since the step before; zeros where that was not asked."""


class ChunkTable:
    """Rows of chunks, kept as columns.

    Example:
        >>> table = ChunkTable()
        >>> table.append(0, 4096, 700, 1024, 1, 0xCBF43926)
        0
        >>> len(table), table.row(0).stored
        (1, 700)
    """

    __slots__ = ("codec", "crc", "file", "fingerprint", "offset", "raw", "stored")

    def __init__(self) -> None:
        self.file = array("I")
        self.offset = array("Q")
        self.stored = array("I")
        self.raw = array("I")
        self.codec = array("B")
        self.crc = array("I")
        self.fingerprint = bytearray()

    def append(
        self,
        file: int,
        offset: int,
        stored: int,
        raw: int,
        codec: int,
        crc: int,
        fingerprint: bytes | memoryview = bytes(FINGERPRINT_BYTES),
    ) -> int:
        """Add a row and return its number; the arguments are those of `Chunk`.

        Raises:
            ValueError: a number that the columns cannot hold.
        """
        if (
            not (0 <= file < 1 << 32 and 0 <= offset <= UINT63 and 0 <= codec < 256 and 0 <= crc < 1 << 32)
            or not (1 <= stored <= raw <= CHUNK_BYTES)
            or len(fingerprint) != FINGERPRINT_BYTES
        ):
            raise ValueError(
                f"chunk: {(file, offset, stored, raw, codec, crc, bytes(fingerprint))} is not a valid row."
            )
        self.file.append(file)
        self.offset.append(offset)
        self.stored.append(stored)
        self.raw.append(raw)
        self.codec.append(codec)
        self.crc.append(crc)
        self.fingerprint += fingerprint
        return len(self.crc) - 1

    def row(self, number: int) -> Chunk:
        """Return a row."""
        begin = range(len(self))[number] * FINGERPRINT_BYTES
        return Chunk(
            self.file[number],
            self.offset[number],
            self.stored[number],
            self.raw[number],
            self.codec[number],
            self.crc[number],
            bytes(self.fingerprint[begin : begin + FINGERPRINT_BYTES]),
        )

    def __len__(self) -> int:
        return len(self.crc)

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and all(getattr(self, c) == getattr(other, c) for c in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkTable of {len(self)} rows"

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON: base64 of little-endian columns; "" where a column is all zeros."""
        value: dict[str, Any] = {"count": len(self)}
        for name in ("file", "offset", "stored", "raw", "codec", "crc"):
            column = getattr(self, name)
            value[name] = encode(_little_endian(column)) if any(column) else ""
        value["fingerprint"] = encode(self.fingerprint) if any(self.fingerprint) else ""
        return value

    @classmethod
    def from_json(cls, value: Any, files: list[FileRecord], codecs: int, at: str) -> ChunkTable:
        """Return the table that `to_json` wrote.

        Args:
            value: the JSON.
            files: files of the index.
            codecs: number of codecs of the index.
            at: place for messages.

        Raises:
            FormatError: columns of other lengths, numbers out of range, bytes outside of their file, or chunks that
                overlap without being the same.
        """
        fields = Fields(value, at, _KEYS)
        table = cls()
        count = len(fields.blob("raw")) // table.raw.itemsize  # never 0, so this column is always there
        if fields.integer("count", 0, UINT63) != count:
            refuse(fields.at("count"), fields.value("count"), f"must be the number of values of raw, {count}")
        for name in ("file", "offset", "stored", "raw", "codec", "crc"):
            column = getattr(table, name)
            size = count * column.itemsize
            column.frombytes(bytes(size) if fields.value(name) == "" else fields.blob(name, size))
            setattr(table, name, _little_endian(column))
        size = FINGERPRINT_BYTES * count
        missing = fields.value("fingerprint") == ""
        table.fingerprint = bytearray(size) if missing else bytearray(fields.blob("fingerprint", size))
        table._check(files, codecs, at)
        return table

    def _check(self, files: list[FileRecord], codecs: int, at: str) -> None:
        ends = [file.bytes for file in files]
        reached = [0] * len(files)
        rising = True
        rows = zip(self.file, self.offset, self.stored, self.raw, self.codec, strict=True)
        for number, (file, offset, stored, raw, codec) in enumerate(rows):
            place = f"{at}[{number}]"
            if file >= len(ends):
                refuse(f"{place}: file", file, f"must be the number of one of {len(ends)} files")
            if codec > codecs:
                refuse(f"{place}: codec", codec, f"must be 0 or the number of one of {codecs} codecs")
            if not 1 <= raw <= CHUNK_BYTES:
                refuse(f"{place}: raw", raw, f"must be from 1 to {CHUNK_BYTES} bytes")
            if not (1 <= stored <= raw if codec else stored == raw):
                refuse(f"{place}: stored", stored, f"must be {'at most ' if codec else ''}the {raw} bytes of raw")
            end = offset + stored
            if end > ends[file]:
                refuse(f"{place}: offset", offset, f"must leave {stored} bytes in a file of {ends[file]}")
            rising = rising and offset >= reached[file]
            reached[file] = end
        if not rising:
            self._check_overlap(at)

    def _check_overlap(self, at: str) -> None:
        order = sorted(range(len(self)), key=lambda n: (self.file[n], self.offset[n], self.stored[n]))
        for first, second in itertools.pairwise(order):
            same_file = self.file[first] == self.file[second]
            overlap = same_file and self.offset[first] + self.stored[first] > self.offset[second]
            if overlap and self.row(first)[:6] != self.row(second)[:6]:
                raise FormatError(
                    f"{at}: chunks {first} and {second} overlap: bytes from {self.offset[first]} and "
                    f"{self.offset[second]} of file {self.file[first]}, and are not the same."
                )


def _little_endian(column: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return column
    column = column[:]
    column.byteswap()
    return column
