"""From a row of a chunk table back to the tensor whose bytes it holds."""

from __future__ import annotations

import bisect

from .._format import Index, Manifest, PieceRecord, TensorRecord

__all__ = ["Rows", "name_of", "tensor_of"]


def tensor_of(manifest: Manifest, index: Index, number: int) -> TensorRecord:
    """Return the record of a tensor that a piece of an index names."""
    count = len(manifest.tensors)
    return manifest.tensors[number] if number < count else index.local_tensors[number - count]


def name_of(manifest: Manifest, index: Index, number: int) -> str:
    """Return the name of a tensor; that of a rank-local one says of which rank."""
    record = tensor_of(manifest, index, number)
    return record.name if number < len(manifest.tensors) else f"rank {index.writer}: {record.name}"


class Rows:
    """Finds the tensor of a row of one index."""

    def __init__(self, manifest: Manifest, index: Index) -> None:
        self._manifest, self._index = manifest, index
        self._pieces: list[PieceRecord] = sorted((r for r in index.pieces if r.count), key=lambda record: record.first)
        self._firsts = [record.first for record in self._pieces]

    def _number(self, row: int) -> int:
        return self._pieces[bisect.bisect_right(self._firsts, row) - 1].tensor

    def name(self, row: int) -> str:
        """Return the name of the tensor that the row belongs to."""
        return name_of(self._manifest, self._index, self._number(row))

    def itemsize(self, row: int) -> int:
        """Return the bytes per element of the tensor that the row belongs to."""
        return tensor_of(self._manifest, self._index, self._number(row)).itemsize
