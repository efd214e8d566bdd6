"""The index of a writer: which pieces of which tensors it wrote, in which chunks, and its small and local values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .._geometry import Box, Piece
from ..errors import FormatError
from .chunks import ChunkTable, FileRecord
from .fields import Fields, check_format, columns, encode, integers, shape_of
from .jsonio import dumps, loads, refuse, short
from .limits import FORMAT, INDEX_BYTES, INLINE_BYTES, NAME_CHARS, UINT63
from .manifest import LOCAL, Manifest, TensorRecord, check_tree, kind_of
from .paths import DATA_PATH

__all__ = ["Index", "PieceRecord"]

_KEYS = "format writer codecs files pieces chunks inline local local_tensors"
_CODEC = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """A piece that was written."""

    tensor: int
    """Number of the tensor in the manifest; from the number of those on, of the writer's local tensors."""
    piece: Piece
    """Which elements."""
    first: int
    """First row of the chunk table that holds them."""
    count: int
    """How many rows; they stand one after the other and belong to no other piece."""


@dataclass(slots=True)
class Index:
    """What one writer wrote."""

    writer: int
    """Its number."""
    codecs: list[str] = field(default_factory=list)
    """Codecs that the chunk table refers to, counted from 1."""
    files: list[FileRecord] = field(default_factory=list)
    """Data files that the chunk table refers to, of this step and of earlier ones."""
    pieces: list[PieceRecord] = field(default_factory=list)
    """What was written, in the order of the chunks."""
    chunks: ChunkTable = field(default_factory=ChunkTable)
    """Where the bytes are."""
    inline: dict[int, bytes] = field(default_factory=dict)
    """Whole tensors of at most 256 bytes, by number."""
    local: list[Any] = field(default_factory=list)
    """Values that belong to this writer, as JSON; `{"$local": n}` in the manifest's tree stands for the n-th."""
    local_tensors: list[TensorRecord] = field(default_factory=list)
    """Tensors that belong to this writer."""

    def to_bytes(self) -> bytes:
        """Return the content of the writer's index file.

        Raises:
            FormatError: pieces whose rows do not stand one after the other, or values that are not JSON.
        """
        pieces = sorted(self.pieces, key=lambda record: record.first)
        row = 0
        for record in pieces:
            if record.first != row:
                raise FormatError(f"index of writer {self.writer}: {record} should begin at row {row} of the chunks.")
            row += record.count
        boxes: dict[Box, int] = {}
        value = {
            "format": FORMAT,
            "writer": self.writer,
            "codecs": self.codecs,
            "files": columns(self.files, "path", "bytes"),
            "pieces": {
                "tensor": [record.tensor for record in pieces],
                "box": [boxes.setdefault(record.piece.box, len(boxes)) for record in pieces],
                "start": [record.piece.start for record in pieces],
                "stop": [record.piece.stop for record in pieces],
                "count": [record.count for record in pieces],
                "boxes": [[box.offset, box.shape] for box in boxes],
            },
            "chunks": self.chunks.to_json(),
            "inline": {"tensor": list(self.inline), "data": encode(b"".join(self.inline.values()))},
            "local": self.local,
            "local_tensors": [[record.name, record.dtype, record.shape] for record in self.local_tensors],
        }
        return dumps(value, f"index of writer {self.writer}")

    @classmethod
    def from_bytes(cls, data: bytes, manifest: Manifest, at: str = "index") -> Index:
        """Return the index that `data` holds, with every number checked.

        Args:
            data: content of the index file.
            manifest: of the same checkpoint.
            at: name of the file, for messages.

        Raises:
            FormatError: naming the field, what it holds and the rule.
        """
        value = loads(data, at, INDEX_BYTES)
        check_format(value, at)
        fields = Fields(value, at, _KEYS)
        codecs = fields.strings("codecs", 32)
        if len(codecs) > 255 or not all(map(_CODEC.fullmatch, codecs)):
            refuse(fields.at("codecs"), str(codecs), "must be at most 255 names of lower-case letters, digits and _.-")
        files = _files(fields.inner("files", "path bytes"))
        local_tensors = _local_tensors(fields.items("local_tensors"), fields.at("local_tensors"))
        tensors = [*manifest.tensors, *local_tensors]
        chunks = ChunkTable.from_json(fields.value("chunks"), files, len(codecs), fields.at("chunks"))
        pieces = _pieces(fields.inner("pieces", "tensor box start stop count boxes"), tensors, chunks)
        inline = _inline(fields.inner("inline", "tensor data"), tensors, {record.tensor for record in pieces})
        local = fields.items("local")
        check_tree(local, len(tensors), fields.at("local"))
        writer = fields.integer("writer", 0, manifest.world - 1)
        return cls(writer, codecs, files, pieces, chunks, inline, local, local_tensors)


def _files(fields: Fields) -> list[FileRecord]:
    paths = fields.strings("path", 256)
    for number, path in enumerate(paths):
        if not DATA_PATH.fullmatch(path):
            refuse(
                f"{fields.at('path')}[{number}]",
                path,
                "must be steps/<folder of a step>/data/<name> or chunks/<2 hex digits>/<64 hex digits>",
            )
    return [FileRecord(*row) for row in zip(paths, fields.ints("bytes", length=len(paths)), strict=True)]


def _local_tensors(values: list[Any], at: str) -> list[TensorRecord]:
    found = []
    names: set[str] = set()
    for number, value in enumerate(values):
        place = f"{at}[{number}]"
        if not isinstance(value, list) or len(value) != 3:
            refuse(place, value, "must be [name, dtype, shape]")
        name = value[0]
        if not isinstance(name, str) or len(name) > NAME_CHARS or name in names:
            refuse(f"{place}: name", name, f"must be a string of at most {NAME_CHARS} characters that no other one has")
        names.add(name)
        found.append(TensorRecord(name, *kind_of(value[1], value[2], place), LOCAL))
    return found


def _pieces(fields: Fields, tensors: list[TensorRecord], chunks: ChunkTable) -> list[PieceRecord]:
    boxes = []
    for number, value in enumerate(fields.items("boxes")):
        place = f"{fields.at('boxes')}[{number}]"
        if not isinstance(value, list) or len(value) != 2:
            refuse(place, value, "must be [offset, shape]")
        shape, numel = shape_of(value[1], f"{place}: shape", UINT63)
        boxes.append((Box(tuple(integers(value[0], f"{place}: offset", 0, UINT63, len(shape))), shape), numel))
    owners = fields.ints("tensor", 0, len(tensors) - 1)
    count = len(owners)
    which = fields.ints("box", 0, len(boxes) - 1, count)
    starts, stops = fields.ints("start", length=count), fields.ints("stop", length=count)
    counts = fields.ints("count", 1, len(chunks), count)
    found, row = [], 0
    fits: set[tuple[tuple[int, ...], int]] = set()
    for number, (owner, chosen, start, stop, rows) in enumerate(zip(owners, which, starts, stops, counts, strict=True)):
        (box, numel), tensor = boxes[chosen], tensors[owner]
        place = f"piece {number}, of tensor {short(tensor.name)}"
        if (tensor.shape, chosen) not in fits:
            if box.ndim != len(tensor.shape) or not Box.whole(tensor.shape).contains(box):
                refuse(fields.at(place), str(box), f"must have a box inside of shape {short(str(list(tensor.shape)))}")
            fits.add((tensor.shape, chosen))
        if not start < stop <= numel:
            refuse(fields.at(place), f"{start}:{stop}", f"must be a range of the {numel} elements of its box")
        raw = chunks.raw[row : row + rows]
        if sum(raw) != (stop - start) * tensor.itemsize or row + rows > len(chunks):
            refuse(fields.at(place), sum(raw), f"must have chunks of {(stop - start) * tensor.itemsize} bytes in all")
        if any(size % tensor.itemsize for size in raw):
            refuse(fields.at(place), str(list(raw[:8])), f"must have chunks of elements of {tensor.itemsize} bytes")
        found.append(PieceRecord(owner, Piece(box, start, stop), row, rows))
        row += rows
    if row != len(chunks):
        refuse(fields.at("count"), row, f"must be {len(chunks)} in sum, all chunks")
    return found


def _inline(fields: Fields, tensors: list[TensorRecord], elsewhere: set[int]) -> dict[int, bytes]:
    numbers = fields.ints("tensor", 0, len(tensors) - 1)
    data = fields.blob("data")
    found: dict[int, bytes] = {}
    begin = 0
    for number in numbers:
        size = tensors[number].nbytes
        at = f"{fields.at('tensor')} {number}"
        if size > INLINE_BYTES:
            refuse(at, size, f"must have at most {INLINE_BYTES} bytes")
        if number in found or number in elsewhere:
            raise FormatError(f"{at}: tensor {short(tensors[number].name)} is stored twice.")
        found[number] = data[begin : begin + size]
        begin += size
    if begin != len(data):
        refuse(fields.at("data"), len(data), f"must have {begin} bytes, those of its tensors")
    return found
