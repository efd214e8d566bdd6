"""Reduction of coded numbers: parts go to their owners in code, are summed in float32, and come back in code.

Each number is rounded twice, whatever the number of ranks, and nothing is summed in the code's dtype. Source of the
scheme: Wang et al., "ZeRO++" (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._plan import BufferPlan
from .base import Base
from .codecs import Bfloat16, Codec, Float16, Int8
from .wire import Steps, Wire

__all__ = ["BlockInt8", "HalfBfloat16", "HalfFloat16"]


class _Quantised(Base):
    """Reduces in code.

    The owner of a part adds what it owes for it to the sums, and owes what it does not tell in its answer as if that
    were its own gradient.
    """

    _codec: Codec

    def _steps(self, buffer: Tensor, total: Tensor, wire: Wire, divisor: float, scatter: bool) -> Steps:
        shard, start = self.plan.shard, wire.rank * self.plan.shard
        code = self._codec.encode(total.view(wire.size, shard))
        if self._memory is not None:
            self._memory.owe(total, self._decode(code))
        del total
        work, came = wire.all_to_all(code)
        yield work
        own = self._decode(came[:1])
        for rank in range(1, wire.size):
            own = own.add_(self._decode(came[rank : rank + 1]))
        own = own if divisor == 1 else own.div_(divisor)
        if self._memory is not None:
            self._memory.pay(own, start, 1 / divisor)
        if scatter:
            buffer[start : start + shard].copy_(own)
            return
        # The code of the sums has the form of that of the gradients, so it may take its place.
        code[wire.rank : wire.rank + 1].copy_(self._codec.encode(own.view(1, shard)))
        yield wire.all_gather(code)
        result = self._decode(code)
        if self._memory is not None:
            self._memory.owe(own.mul_(divisor), result[start : start + shard] * divisor, start)
        buffer.copy_(result)

    def _decode(self, code: Tensor) -> Tensor:
        return self._codec.decode(code, self.plan.shard, self.dtype).reshape(-1)


class HalfBfloat16(_Quantised):
    """bfloat16 on the wire, sums in float32.

    The bits do not depend on buckets or transports.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        feedback: whether what rounding lost is added to the next gradient.
    """

    def __init__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device, *, feedback: bool = False) -> None:
        super().__init__(plan, dtype, device, feedback=feedback)
        self._codec = Bfloat16()


class HalfFloat16(_Quantised):
    """float16 on the wire, scaled by powers of two per block so that nothing overflows; sums in float32.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        block: number of elements that are scaled together.
        feedback: whether what rounding lost is added to the next gradient.
    """

    def __init__(
        self,
        plan: BufferPlan,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block: int = 1024,
        feedback: bool = False,
    ) -> None:
        super().__init__(plan, dtype, device, feedback=feedback)
        self._codec = Float16(block)


class BlockInt8(_Quantised):
    """int8 on the wire with a factor per block, sums in float32, and error feedback.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        block: number of elements that share a factor.
        feedback: whether what rounding lost is added to the next gradient.
    """

    def __init__(
        self, plan: BufferPlan, dtype: torch.dtype, device: torch.device, *, block: int = 256, feedback: bool = True
    ) -> None:
        super().__init__(plan, dtype, device, feedback=feedback)
        self._codec = Int8(block)
