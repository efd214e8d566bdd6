"""`torch.distributed.checkpoint` of DTensors, through the protocol that it offers to tensor subclasses.

Without it a DTensor would be saved as the plain tensor that its storage is: one rank's part under
the name of the whole, without complaint. With it every rank writes and reads its own block in
place; replicas are written once, as for torch's own DTensor, and any layout loads into any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._comm.move import strip
from ._pieces import Piece, view_of
from ._tensor import DTensor
from .errors import UnsupportedOperationError
from .placements import P


def _pieces(x: DTensor) -> tuple[Piece, ...]:
    spec = x._spec
    if any(t == P and size > 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True)):
        raise UnsupportedOperationError(
            f"torch.distributed.checkpoint: a pending sum ({spec!r} on {spec.mesh!r}) has no value to "
            "save or load yet; redistribute it to Replicate() or Shard(dim) first"
        )
    if spec.numel == 0:
        return (Piece((tuple([0] * spec.ndim), spec.local_shape), tuple((0, n) for n in spec.local_shape)),)
    return spec.pieces_of(spec.mesh.coordinate).pieces


def create_write_items(self: DTensor, fqn: str, _: Any) -> list[Any]:
    """What this rank writes: its blocks, if it has any."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for chunk in create_chunk_list(self):
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(strip(self).detach()), size=self._spec.shape
        )
        items.append(WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return items


def create_chunk_list(self: DTensor) -> list[Any]:
    """What this rank reads: its blocks, if it has any."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
        for (offset, shape), _ in _pieces(self)
    ]


def get_tensor_shard(self: DTensor, index: Any) -> Tensor:
    """The memory of one of this rank's blocks."""
    pieces = _pieces(self)
    local = strip(self).detach()
    for piece in pieces:
        if index.offset is None or tuple(index.offset) == piece.box[0]:
            return view_of(local, piece)
    raise ValueError(
        f"torch.distributed.checkpoint asked for the block of {index.fqn!r} at {tuple(index.offset)}; "
        f"this rank holds those at {[piece.box[0] for piece in pieces]} of {self._spec!r}"
    )


def install() -> None:
    """Give the class the methods of the protocol."""
    DTensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[attr-defined]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[attr-defined]
