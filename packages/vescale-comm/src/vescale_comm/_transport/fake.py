"""A transport that sends nothing and counts what it would send: for plans and costs at any world size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Call, broadcast_of, flat_buffer, flat_equal_parts, reduction
from .interface import Work
from .sums import add_in_order

__all__ = ["FakeTransport", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective that was asked for."""

    operation: str
    """Name of the method."""
    nbytes: int
    """Bytes of the buffer."""
    sent: int
    """Bytes that this rank would send if ranks exchanged parts directly."""
    dtype: torch.dtype
    """Of the buffer."""


class FakeTransport:
    """One rank of any number, on its own.

    Values are those of a world in which the other ranks hold zeros and send nothing: sums are the own numbers, divided
    and rounded as asked; gathers and broadcasts leave the buffer as it is. Use it for plans, counts and memory, never
    for values.

    Example:
        >>> fake = FakeTransport(size=1024, rank=7)
        >>> fake.all_gather(torch.zeros(2048)).wait()
        >>> fake.calls[0].nbytes, fake.calls[0].sent
        (8192, 8184)
    """

    name = "fake"
    canonical = True

    def __init__(self, size: int, rank: int = 0) -> None:
        """Choose the world.

        Args:
            size: number of ranks.
            rank: this one.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank: needs 0 <= rank < size; got rank {rank} of {size}.")
        self.rank, self.size = rank, size
        self.calls: list[Sent] = []
        """What was asked for, in order."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Divide the own part; see `Transport`."""
        call = reduction("reduce_scatter", buffer, divisor, accumulate)
        own = flat_equal_parts(buffer, self.size)[self.rank]
        add_in_order([own], own, divisor, accumulate)
        return self._count(call, call.nbytes - own.nbytes)

    def all_gather(self, buffer: Tensor) -> Work:
        """Change nothing; see `Transport`."""
        own = flat_equal_parts(buffer, self.size)[self.rank]
        return self._count(Call("all_gather", buffer.numel(), buffer.dtype), own.nbytes * (self.size - 1))

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Divide the buffer; see `Transport`."""
        call = reduction("all_reduce", buffer, divisor, accumulate)
        flat = flat_buffer(buffer)
        add_in_order([flat], flat, divisor, accumulate)
        # To each owner its part, and the sum of the own part to everybody; earlier parts are longer by one element.
        own = (call.numel + self.size - 1 - self.rank) // self.size
        return self._count(call, call.nbytes + (self.size - 2) * own * call.dtype.itemsize)

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Change nothing; see `Transport`."""
        call, _ = broadcast_of(buffer, source, self.size)
        return self._count(call, call.nbytes * (self.size - 1) if self.rank == source else 0)

    def all_to_all(self, source: Tensor, goal: Tensor) -> Work:
        """Keep the own part; see `Transport`."""
        own = flat_equal_parts(source, self.size)[self.rank]
        flat_equal_parts(goal.zero_(), self.size)[self.rank].copy_(own)
        return self._count(Call("all_to_all", source.numel(), source.dtype), own.nbytes * (self.size - 1))

    def close(self) -> None:
        """Hold nothing, so give back nothing."""

    def _count(self, call: Call, sent: int) -> Work:
        self.calls.append(Sent(call.operation, call.nbytes, sent if self.size > 1 else 0, call.dtype))
        return _Done()


class _Done:
    """Nothing is under way."""

    def wait(self) -> None:
        """Return at once."""
