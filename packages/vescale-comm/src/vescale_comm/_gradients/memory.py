"""Memory of a bucket's buffer that is there only from the first gradient to the end of the reduction (ZeRO-2)."""

from __future__ import annotations

from torch import Tensor

from .._heap import keep_freed_memory
from .._plan import BufferPlan

__all__ = ["IN_FLIGHT", "BucketMemory"]

IN_FLIGHT = 2
"""Buckets whose reduction may be under way while the next one is filled; more would be more memory."""


class BucketMemory:
    """Takes the memory of a buffer away and gives it back; views of the buffer stay what they are.

    Args:
        buffer: flat; its storage must be one that can be resized, as that of torch.zeros.
        plan: of the buffer.
        rank: whose shard is kept.
    """

    def __init__(self, buffer: Tensor, plan: BufferPlan, rank: int) -> None:
        if buffer.device.type == "cpu":
            keep_freed_memory()
        self._storage = buffer.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._own = buffer[rank * plan.shard : (rank + 1) * plan.shard]
        self._gaps = list(_gaps(buffer, plan))
        self.shard = self._own.clone()
        """This rank's part of the sum, in memory of its own."""
        self._storage.resize_(0)

    def hold(self) -> None:
        """Have the memory there, zero where no tensor stands; what is in the tensors' places is undefined."""
        if self._bytes and not self._storage.nbytes():
            self._storage.resize_(self._bytes)
            for gap in self._gaps:
                gap.zero_()

    def keep_shard(self) -> None:
        """After a reduction: keep the shard, and give the rest back."""
        if self._storage.nbytes():
            self.shard.copy_(self._own)
            self._storage.resize_(0)


def _gaps(buffer: Tensor, plan: BufferPlan) -> list[Tensor]:
    found, end = [], 0
    for slot in plan.slots:
        if slot.offset > end:
            found.append(buffer[end : slot.offset])
        end = max(end, slot.stop)
    return [*found, buffer[end:]] if end < plan.numel else found
