"""What a compressor is: it reduces the buffer of one bucket in place of the transport, and sends fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from .._plan import BufferPlan
from .._transport import Transport, Work

__all__ = ["MEMBERS", "Compressor"]

MEMBERS = ("reduce", "state_dict", "load_state_dict", "wire_bytes")


class Compressor(Protocol):
    """Reduces one bucket.

    It is made by a factory from the bucket's plan, the dtype and the device of its buffer, and options; alike on all
    ranks. Buckets may be planned anew, so what it remembers is handed on by the names of parameters.
    """

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent in the last reduction, if parts go straight to the ranks they are for."""

    def reduce(self, buffer: Tensor, plan: BufferPlan, transport: Transport, divisor: float, scatter: bool) -> Work:
        """Start to sum the buffers of the ranks, in place.

        All ranks get the same bits. What is no number, or infinite, must not arrive as an ordinary number.

        Args:
            buffer: the gradients, flat; where the plan has no tensor it holds zeros, and must afterwards.
            plan: of the buffer.
            transport: over the ranks.
            divisor: by which sums are divided.
            scatter: whether only part `rank` of the result is needed; the others are undefined then.
        """

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return by name of the parameter what the next reduction needs to know; tensors share memory."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state; parameters that it does not name start from nothing.

        Raises:
            MismatchError: it names a parameter that is not in the bucket, or holds a tensor of another shape.
        """
