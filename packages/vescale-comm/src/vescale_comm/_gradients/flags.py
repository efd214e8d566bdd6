"""What ranks tell each other at the end of a window: one row of bytes per rank, gathered at once.

A row says whether the rank came through, and per parameter whether it has a gradient. Every rank then knows the same,
so decisions about parameters that nobody used, or about a rank that failed, need no further message.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from .._transport import Transport, Work

__all__ = ["BAD", "CHANGED", "FAILED", "LATE", "ORDER", "USED", "WEIGHTED", "Flags", "Row"]

HEADER = struct.Struct("<B7xd8s")
FAILED, WEIGHTED, ORDER, CHANGED = 1, 2, 4, 8
"""Of a rank: its backward did not end; gradients are weighted; it knows a better order of the parameters;
its parameters were written to since the window before."""
USED, BAD, LATE = 1, 2, 4
"""Of a parameter: it has a gradient; which is not finite; or came when its bucket was already gone."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank says."""

    state: int
    """Any of FAILED, WEIGHTED, ORDER, CHANGED."""
    weight: float
    """By which its gradients were multiplied."""
    digest: bytes
    """Of its list of parameters, eight bytes."""
    parameters: bytes
    """Any of USED, BAD, LATE per parameter."""

    def encode(self) -> bytes:
        """Return the bytes that travel."""
        return HEADER.pack(self.state, self.weight, self.digest) + self.parameters

    @classmethod
    def decode(cls, data: bytes) -> Row:
        """Undo `encode`."""
        state, weight, digest = HEADER.unpack_from(data)
        return cls(state, weight, digest, data[HEADER.size :])


class Flags:
    """The exchange of rows over one transport.

    Args:
        transport: over the ranks.
        count: number of parameters.
        device: on which the transport works.
    """

    def __init__(self, transport: Transport, count: int, device: torch.device) -> None:
        self._transport = transport
        self._own: Row | None = None
        self._width = HEADER.size + count
        self._buffer = transport.allocate(transport.size * self._width, torch.uint8, device)
        self._rows = self._buffer.view(transport.size, -1)
        self._work: Work | None = None

    def send(self, row: Row) -> None:
        """Start the exchange.

        Args:
            row: of this rank.
        """
        self._own = row
        self._rows[self._transport.rank].copy_(torch.frombuffer(bytearray(row.encode()), dtype=torch.uint8))
        self._work = self._transport.all_gather(self._buffer)

    def receive(self) -> list[Row]:
        """Finish it and return the rows of all ranks; on an accelerator this waits for the device.

        Where all are equal, which is the rule, all are one object.
        """
        work, own = self._work, self._own
        if work is None or own is None:
            raise RuntimeError("nothing was sent")
        work.wait()
        self._work = None
        rows = self._rows.cpu()
        if bool((rows == rows[self._transport.rank]).all()):
            return [own] * self._transport.size
        return [Row.decode(bytes(one)) for one in rows.tolist()]
