"""Writes this rank's pieces: cut into chunks, compared with the step before, encoded, appended to data files.

Batches of neighbouring chunks go through worker threads. All the bulk work (checksums, compression, writing) releases
Python's lock, so that training goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _codec
from .._format import INLINE_BYTES, ChunkTable, FileRecord, PieceRecord
from .._storage import Storage
from .base import Base, Place, Stored, places
from .content import HEADER, ContentStore
from .files import Packs
from .handle import Meter
from .options import SaveOptions
from .plain import PlainFile
from .stage import Staged

__all__ = ["Batch", "Writing", "batches_of", "is_inline"]

BATCH_BYTES = 16 << 20
"""Neighbouring chunks that one thread takes at a time."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 4, 64 << 10
SMALLEST_ENCODED = 4096
"""Pieces below this many bytes are kept raw."""
SMALLEST_REFERENCED = 16 << 10
"""Chunks below this many bytes, and below the size of a chunk, are written again: each could keep a large file."""
NO_FINGERPRINT = bytes(16)


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring chunks of one piece."""

    item: Staged
    """The piece and its bytes."""
    codec: str | None
    """How its chunks are encoded; None: raw."""
    first: int
    """Number of the first chunk, of all chunks of this writer."""
    places: list[tuple[int, int]]
    """Per chunk its first and last element in the piece's box."""

    def chunks(self) -> list[Tensor]:
        """Return the bytes of each chunk."""
        start, size = self.item.task.piece.start, self.item.task.itemsize
        return [self.item.data[(low - start) * size : (high - start) * size] for low, high in self.places]


def is_inline(item: Staged) -> bool:
    """Tell whether a piece is a whole tensor that is small enough to be kept in the index."""
    task = item.task
    return (
        task.nbytes <= INLINE_BYTES and task.piece.box.shape == task.shape and task.piece.numel == task.piece.box.numel
    )


def batches_of(
    staged: Sequence[Staged], chunk_bytes: int, codec_of: Callable[[Staged], str | None]
) -> tuple[list[PieceRecord], list[Batch]]:
    """Cut pieces into chunks, and group the chunks.

    Args:
        staged: the pieces with their bytes.
        chunk_bytes: where to cut.
        codec_of: tells how a piece is to be encoded.

    Returns:
        The pieces as the index lists them, and the batches that hold their chunks in the same order.
    """
    pieces, batches, first = [], [], 0
    each = max(1, BATCH_BYTES // chunk_bytes)
    for item in staged:
        task = item.task
        cuts, codec = places(task.piece, task.itemsize, chunk_bytes), codec_of(item)
        pieces.append(PieceRecord(task.number, task.piece, first, len(cuts)))
        batches += [Batch(item, codec, first + at, cuts[at : at + each]) for at in range(0, len(cuts), each)]
        first += len(cuts)
    return pieces, batches


def choose_codec(item: Staged, mode: str | None) -> str | None:
    """Choose how a piece is to be encoded, by a sample of it."""
    if mode is None or item.task.nbytes < SMALLEST_ENCODED:
        return None
    dtype = item.task.dtype
    is_float = dtype.is_floating_point or dtype.is_complex
    chosen = _codec.choose(_sample(item.data), _codec.number_width(dtype), is_float, mode)
    return None if chosen == "raw" else chosen


def _sample(data: Tensor) -> Tensor:
    """Return a few blocks from all over the data; whole elements, so that planes stay planes."""
    if data.numel() <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        return data
    gap = (data.numel() - SAMPLE_BYTES) // (SAMPLE_BLOCKS - 1) // 64 * 64
    return torch.cat([data[i * gap : i * gap + SAMPLE_BYTES] for i in range(SAMPLE_BLOCKS)])


class Writing:
    """The chunks of one writer in one save, while they are written."""

    def __init__(
        self,
        storage: Storage,
        packs: Packs | PlainFile,
        names: Mapping[int, tuple[str, str]],
        options: SaveOptions,
        base: Base | None,
        meter: Meter,
        *,
        share: bool,
    ) -> None:
        """Take where to write, per tensor number its name and dtype, and whether chunks are shared by content."""
        self._packs, self._names, self._meter = packs, names, meter
        self._fingerprints = options.dedup_mode == "position"
        self._base = base.chunks if base is not None and self._fingerprints else {}
        self._smallest = min(SMALLEST_REFERENCED, options.chunk_bytes)
        self.content = ContentStore(storage) if share else None
        self._lock = threading.Lock()
        self._rows: dict[int, Stored] = {}

    def write(self, batch: Batch) -> None:
        """Write the chunks of a batch that no earlier step has. Threads may call this at once."""
        rows: dict[int, Stored] = {}
        raw: list[tuple[int, Tensor, int, bytes]] = []
        width = _codec.number_width(batch.item.task.dtype)
        for number, (data, place) in enumerate(zip(batch.chunks(), batch.places, strict=True), batch.first):
            fingerprint = _codec.fingerprint(data) if self._fingerprints else NO_FINGERPRINT
            refers = self._base and data.numel() >= self._smallest
            known = self._base.get(self._place(batch, place)) if refers else None
            if known is not None and (known.raw, known.fingerprint) == (data.numel(), fingerprint):
                rows[number] = known
                self._meter.add(done=known.raw, reused=known.raw)
                continue
            crc = _codec.crc32(data)
            if self.content is not None:
                rows[number] = self._share(self.content, batch, data, crc)
            else:
                # Encoded while the chunk is in the cache, and written at once, since codecs reuse their memory.
                entry = (number, data, crc, fingerprint)
                codec, buffers = encode(batch.codec, data, width)
                if codec is None:
                    raw.append(entry)
                else:
                    rows |= self._put([entry], codec, buffers)
        # Chunks that stay as they are go out together, so that they can be read together.
        rows |= self._put(raw, None, [_codec.memory(data) for _, data, _, _ in raw])
        with self._lock:
            self._rows |= rows

    def _place(self, batch: Batch, place: tuple[int, int]) -> Place:
        box = batch.item.task.piece.box
        return (*self._names[batch.item.task.number], box.offset, box.shape, *place)

    def _put(
        self, entries: list[tuple[int, Tensor, int, bytes]], codec: str | None, buffers: list[memoryview]
    ) -> dict[int, Stored]:
        """Write one encoded chunk, or several raw ones."""
        if not entries:
            return {}
        file, at = self._packs.append(entries[0][0], buffers)
        rows = {}
        for number, data, crc, fingerprint in entries:
            size = data.numel() if codec is None else sum(buffer.nbytes for buffer in buffers)
            rows[number] = Stored(data.numel(), crc, fingerprint, codec, file, at, size)
            at += size
            self._meter.add(done=data.numel(), written=size)
        return rows

    def _share(self, content: ContentStore, batch: Batch, data: Tensor, crc: int) -> Stored:
        path, known = content.find(_codec.memory(data))
        if known is None:
            file, codec, new = content.put(path, *encode(batch.codec, data, _codec.number_width(batch.item.task.dtype)))
        else:
            (file, codec), new = known, False
        self._meter.add(done=data.numel(), written=file.bytes * new, reused=data.numel() * (not new))
        return Stored(data.numel(), crc, NO_FINGERPRINT, codec, file, HEADER, file.bytes - HEADER)

    def table(self, own: Sequence[FileRecord]) -> tuple[list[FileRecord], list[str], ChunkTable]:
        """Return the files, the codecs and the chunks in order, as the index lists them.

        Args:
            own: the packs of this save.
        """
        files, codecs, table = list(own), list[str](), ChunkTable()
        file_at = {record.path: number for number, record in enumerate(files)}
        for number in range(len(self._rows)):
            row = self._rows[number]
            if isinstance(row.file, int):
                file = row.file
            else:
                file = file_at.setdefault(row.file.path, len(files))
                if file == len(files):
                    files.append(row.file)
            if row.codec is not None and row.codec not in codecs:
                codecs.append(row.codec)
            codec = codecs.index(row.codec) + 1 if row.codec is not None else 0
            table.append(file, row.offset, row.stored, row.raw, codec, row.crc, row.fingerprint)
        return files, codecs, table


def encode(codec: str | None, data: Tensor, width: int) -> tuple[str | None, list[memoryview]]:
    """Return how a chunk is stored, and its bytes: encoded if that pays, raw otherwise."""
    buffers = _codec.codec(codec).encode(data, width) if codec is not None else None
    return (None, [_codec.memory(data)]) if buffers is None else (codec, list(buffers))
