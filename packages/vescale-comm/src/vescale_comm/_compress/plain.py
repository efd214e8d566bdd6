"""No compression, as a compressor: to compare others with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._plan import BufferPlan
from .._transport import Transport, Work
from .wire import Wire

__all__ = ["Uncompressed"]


class Uncompressed:
    """Sends gradients as they are; gives the bits of a reduction without a compressor."""

    def __init__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.wire_bytes = 0
        """Bytes that this rank sent in the last reduction."""

    def reduce(self, buffer: Tensor, plan: BufferPlan, transport: Transport, divisor: float, scatter: bool) -> Work:
        """Start to sum the buffers of the ranks, in place; see `Compressor`."""
        wire = Wire(transport)
        work = wire.reduce_scatter(buffer, divisor) if scatter else wire.all_reduce(buffer, divisor)
        self.wire_bytes = wire.sent
        return work

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Need nothing."""
