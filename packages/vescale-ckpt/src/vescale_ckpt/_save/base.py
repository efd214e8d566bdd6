"""The chunks of the step before, found by the place in the tensor that they hold.

Kept in memory from one save to the next; a new process reads them from the indexes of the latest step.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .._format import ITEMSIZE, FileRecord, Index, TensorRecord, read_commit, read_index, read_manifest
from .._geometry import Piece
from .._state import TensorSpec
from .._storage import Storage
from ..errors import CheckpointError

__all__ = ["Base", "Place", "Stored", "forget", "load_base", "names_by_number", "places", "recall", "remember"]

log = logging.getLogger("vescale_ckpt")

MOST_WRITERS = 16
"""Of a step that another number of ranks saved, the indexes of this many are read."""
MOST_KEPT = 16
"""Stores, and ranks that are threads, of which the last step is kept; of others it is read again."""
CHUNK_BYTES = range(4096, 1 << 32, 4096)
"""Chunk sizes that a manifest may name."""
LEAST_LIVE = 4
"""A file of a step that is gone is referred to if at least one part in so many of its bytes is still needed."""
Place = tuple[str, str, tuple[int, ...], tuple[int, ...], int, int]
"""Name and dtype of a tensor, offset and shape of a box, and the chunk's first and last element in it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk that is on storage."""

    raw: int
    """Bytes before encoding."""
    crc: int
    """CRC32 of those."""
    fingerprint: bytes
    """Fingerprint of those."""
    codec: str | None
    """Name of the codec; None if it is stored as it is."""
    file: FileRecord | int
    """The file that holds it: of an earlier step or shared, or the number of a pack that is being written."""
    offset: int
    """First byte in the file."""
    stored: int
    """Bytes in the file."""


@dataclass(slots=True)
class Base:
    """The step that a save may refer to."""

    folder: str
    """Of the step, in the store."""
    chunks: dict[Place, Stored] = field(default_factory=dict)
    """By place."""

    def add(self, index: Index, names: Mapping[int, tuple[str, str]], chunk_bytes: int) -> None:
        """Take the chunks of one writer.

        Args:
            index: what the writer wrote.
            names: per tensor number its name and dtype.
            chunk_bytes: at which multiples that save cut its pieces.
        """
        for record in index.pieces:
            if record.tensor not in names:
                continue
            name, dtype = names[record.tensor]
            for offset, (low, high) in enumerate(places(record.piece, ITEMSIZE[dtype], chunk_bytes)):
                chunk = index.chunks.row(record.first + offset)
                self.chunks[(name, dtype, record.piece.box.offset, record.piece.box.shape, low, high)] = Stored(
                    chunk.raw,
                    chunk.crc,
                    chunk.fingerprint,
                    index.codecs[chunk.codec - 1] if chunk.codec else None,
                    index.files[chunk.file],
                    chunk.offset,
                    chunk.stored,
                )

    def without_waste(self, gone: Collection[str]) -> Base:
        """Leave out what would keep mostly dead data on storage.

        A file of a step that is still there costs nothing to refer to. One of a step that was removed is kept only by
        who refers to it, and as a whole: where little of it is needed, that is written again and the file can go.

        Args:
            gone: folders of steps that were removed.

        Returns:
            The chunks to refer to: those of other files, and of such files of which enough is needed.
        """
        live: dict[FileRecord, int] = {}
        for chunk in self.chunks.values():
            if isinstance(chunk.file, FileRecord) and chunk.file.path.partition("/data/")[0] in gone:
                live[chunk.file] = live.get(chunk.file, 0) + chunk.stored
        waste = {file for file, needed in live.items() if needed * LEAST_LIVE < file.bytes}
        if not waste:
            return self
        return Base(self.folder, {place: chunk for place, chunk in self.chunks.items() if chunk.file not in waste})


def names_by_number(
    tensors: Sequence[TensorRecord | TensorSpec], own: Sequence[TensorRecord], writer: int
) -> dict[int, tuple[str, str]]:
    """Return (name, dtype) of each tensor by its number; a writer's own ones count on from those of all.

    Args:
        tensors: of the whole.
        own: the writer's own.
        writer: its number, which tells tensors of one name on different ranks apart.
    """
    names = [(tensor.name, tensor.dtype) for tensor in tensors]
    names += [(f"rank {writer}: {tensor.name}", tensor.dtype) for tensor in own]
    return dict(enumerate(names))


def places(piece: Piece, itemsize: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return where a piece is cut into chunks, as (first, one past the last) element of its box.

    Cuts lie at multiples of the chunk size from the beginning of the box, not of the piece, so that the chunks of a
    run of rows are the same ones however many ranks share the rows.

    Example:
        >>> from .._geometry import Box
        >>> places(Piece(Box((0,), (100,)), 5, 40), 4, 64)
        [(5, 16), (16, 32), (32, 40)]
    """
    step = chunk_bytes // itemsize
    cuts = [piece.start, *range((piece.start // step + 1) * step, piece.stop, step), piece.stop]
    return list(itertools.pairwise(cuts))


_lock = threading.Lock()
_kept: OrderedDict[tuple[str, int, int], Base] = OrderedDict()


def remember(store: str, rank: int, world: int, base: Base) -> None:
    """Keep what the next save of a store may refer to.

    Args:
        store: id of the store, from its marker: a place may be emptied and used again, and have several names.
        rank: the writer.
        world: number of writers.
        base: what it wrote.
    """
    with _lock:
        _kept[(store, rank, world)] = base
        _kept.move_to_end((store, rank, world))
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)


def recall(store: str, rank: int, world: int, folder: str) -> Base | None:
    """Return what is kept of a step, if it is the latest that was kept for the store."""
    with _lock:
        base = _kept.get((store, rank, world))
    return base if base is not None and base.folder == folder else None


def load_base(storage: Storage, folder: str, rank: int, world: int) -> Base | None:
    """Read the chunks of a step from storage; None if it cannot be read, for then everything is written anew.

    Args:
        storage: the store.
        folder: of a committed step.
        rank: this writer.
        world: number of writers of the save that begins. A step of another number has cut its tensors otherwise, so
            all of its writers are read, unless they are many.
    """
    try:
        step = read_commit(storage, folder)
        manifest = read_manifest(storage, step)
        chunk_bytes = manifest.options.get("chunk_bytes")
        writers = [rank] if manifest.world == world else range(min(manifest.world, MOST_WRITERS))
        base = Base(folder)
        for writer in writers:
            index = read_index(storage, step, manifest, writer)
            if type(chunk_bytes) is int and chunk_bytes in CHUNK_BYTES:
                base.add(index, names_by_number(manifest.tensors, index.local_tensors, writer), chunk_bytes)
        return base
    except (CheckpointError, OSError) as error:
        log.warning("%s cannot be referred to, everything is written anew: %s", folder, error)
        return None


def forget() -> None:
    """Drop what is kept, as a new process begins."""
    with _lock:
        _kept.clear()
