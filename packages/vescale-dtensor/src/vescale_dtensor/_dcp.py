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
from ._tensor import DTensor
from .errors import UnsupportedOperationError
from .placements import P


def _chunk(x: DTensor) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec = x._spec
    if any(t == P and size > 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True)):
        raise UnsupportedOperationError(
            f"torch.distributed.checkpoint: a pending sum ({spec!r} on {spec.mesh!r}) has no value to "
            "save or load yet; redistribute it to Replicate() or Shard(dim) first"
        )
    return ChunkStorageMetadata(offsets=torch.Size(spec.local_offset), sizes=torch.Size(spec.local_shape))


def _is_empty(x: DTensor) -> bool:
    return x._spec.numel > 0 and 0 in x._spec.local_shape


def create_write_items(self: DTensor, fqn: str, _: Any) -> list[Any]:
    """What this rank writes: its block, if it has one."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = _chunk(self)
    if _is_empty(self):
        return []
    data = TensorWriteData(
        chunk=chunk, properties=TensorProperties.create_from_tensor(strip(self).detach()), size=self._spec.shape
    )
    return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]


def create_chunk_list(self: DTensor) -> list[Any]:
    """What this rank reads: its block, if it has one."""
    chunk = _chunk(self)
    return [] if _is_empty(self) else [chunk]


def get_tensor_shard(self: DTensor, index: Any) -> Tensor:
    """The memory of this rank's block."""
    if index.offset is not None and tuple(index.offset) != self._spec.local_offset:
        raise ValueError(
            f"torch.distributed.checkpoint asked for the block of {index.fqn!r} at {tuple(index.offset)}; "
            f"this rank holds the one at {self._spec.local_offset} of {self._spec!r}"
        )
    return strip(self).detach()


def install() -> None:
    """Give the class the methods of the protocol."""
    DTensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[attr-defined]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[attr-defined]
