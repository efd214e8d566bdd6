"""The data file of a writer in the plain layout: ordinary safetensors, where the place of every piece is fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._format import FileRecord, PieceRecord, data_path
from .._format.safetensors_file import plain_header
from .._storage import Sink, Storage

if TYPE_CHECKING:
    from .engine import Batch

__all__ = ["PlainFile"]


class PlainFile:
    """One file `data/w00003-0.safetensors` that holds the pieces in their order."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        writer: int,
        pieces: Sequence[PieceRecord],
        batches: Sequence[Batch],
        names: Mapping[int, tuple[str, str]],
    ) -> None:
        """Write the header.

        Args:
            storage: where to.
            folder: name of the step's folder.
            writer: number of the writer.
            pieces: what the file is to hold.
            batches: the chunks of the pieces, in order.
            names: per tensor number its name and dtype.
        """
        self._path = data_path(folder, writer, 0, "safetensors")
        self._sink: Sink | None = None
        self._places: dict[int, int] = {}
        self._size = 0
        if not pieces:
            return
        shapes = {batch.item.task.number: batch.item.task.shape for batch in batches}
        tensors = {number: (*names[number], shape) for number, shape in shapes.items()}
        header = plain_header(folder, writer, pieces, tensors)
        starts = {record.first: start for record, start in zip(pieces, header.starts, strict=True)}
        at = 0
        for batch in batches:
            at = starts.get(batch.first, at)
            self._places[batch.first] = at
            at += sum(high - low for low, high in batch.places) * batch.item.task.itemsize
        self._size = header.size
        self._sink = storage.create(self._path)
        self._sink.write(0, [memoryview(header.data)])

    def append(self, row: int, buffers: Sequence[memoryview]) -> tuple[int, int]:
        """Write the bytes of chunk `row` and its neighbours; return (number of the file, offset of the first byte)."""
        assert self._sink is not None
        self._sink.write(self._places[row], buffers)
        return 0, self._places[row]

    def close(self) -> None:
        """Make the file durable."""
        if self._sink is not None:
            self._sink.close()

    def abort(self) -> None:
        """Remove the file."""
        if self._sink is not None:
            self._sink.abort()

    def records(self) -> list[FileRecord]:
        """Return the file as an index lists it."""
        return [FileRecord(self._path, self._size)] if self._sink is not None else []
