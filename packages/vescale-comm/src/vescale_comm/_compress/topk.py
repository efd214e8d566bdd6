"""The largest elements of each gradient only, with error feedback.

Source: Lin et al., "Deep gradient compression" (2018); Stich et al., "Sparsified SGD with memory" (2018).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._plan import BufferPlan
from .base import Base
from .wire import Steps, Wire

__all__ = ["TopK"]


class TopK(Base):
    """Sends the elements of largest magnitude, with their places, to all ranks; the others are owed.

    The bytes a rank sends grow with the number of ranks, as those of any sparse gather: use a ratio well below the
    inverse of it. What is not finite counts as large, and arrives as it was.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        ratio: share of the elements of each parameter that is sent, at least one; up to 1.
        feedback: whether what was not sent is added to the next gradient.
    """

    def __init__(
        self,
        plan: BufferPlan,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ratio: float = 0.01,
        feedback: bool = True,
    ) -> None:
        super().__init__(plan, dtype, device, feedback=feedback)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: top-k needs 0 < ratio <= 1; got {ratio}.")
        if plan.numel >= 2**31:
            raise ValueError(
                f"plan: places are sent in 32 bits; got a bucket of {plan.numel} elements. Use smaller ones."
            )
        self._wanted = [(slot, math.ceil(ratio * slot.numel)) for slot in plan.slots if slot.numel]
        self._count = sum(count for _, count in self._wanted)

    def _steps(self, buffer: Tensor, total: Tensor, wire: Wire, divisor: float, scatter: bool) -> Steps:
        if not self._wanted:
            return
        places = torch.cat([self._largest(total[s.offset : s.stop], count) + s.offset for s, count in self._wanted])
        values = total[places]
        if self._memory is not None:
            self._memory.owe(total, torch.zeros_like(total).index_copy_(0, places, values))
        rows = torch.empty(wire.size, self._bytes(), dtype=torch.uint8, device=total.device)
        cut = values.nbytes
        rows[wire.rank, :cut].copy_(values.view(torch.uint8))
        rows[wire.rank, cut:].copy_(places.int().view(torch.uint8))
        yield wire.all_gather(rows)
        result = total.zero_()
        for row in rows.unbind():
            # Places in a row differ, so the order of additions is that of ranks.
            result.index_add_(0, row[cut:].clone().view(torch.int32).long(), row[:cut].clone().view(self.dtype))
        buffer.copy_(result if divisor == 1 else result.div_(divisor))

    def _bytes(self) -> int:
        return self._count * (self.dtype.itemsize + 4)

    @staticmethod
    def _largest(part: Tensor, count: int) -> Tensor:
        # NaN is larger than infinity here.
        return part.abs().topk(count, sorted=False).indices
