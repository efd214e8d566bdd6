"""What a transport is: collectives over one group, in place on flat buffers, asynchronous.

Strategies know this interface only, so any of them runs over gloo, NCCL, peer to peer, shared memory, or an emulator.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Transport", "Work"]


class Work(Protocol):
    """A collective under way; its buffer must not be touched before `wait` returns."""

    def wait(self) -> None:
        """Finish it. On an accelerator: let the current stream wait for it.

        Raises:
            TransportError: it failed or ran into the time-out; the text names the collective and the ranks.
            MismatchError: the transport saw that another rank asked for something else.
        """


class Transport(Protocol):
    """Collectives over the ranks of one group.

    Every rank calls the same collectives in the same order, with buffers of the same size and dtype; several may be
    under way, and may be waited for in any order. `size` below is the number of ranks. Sums are divided by `divisor`
    once, at their owner, in the dtype of the sum. In canonical order a sum is `((x[0] + x[1]) + x[2]) + ...` over the
    ranks of the group, in `accumulate` or else in the buffer's dtype, and is rounded to the buffer's dtype once: the
    same bits however a buffer is cut.

    A transport may also have `all_to_all(source, goal)`, which sends part `i` of one flat buffer to rank `i` and gets
    part `i` of the other one from it. Compressors use it, and gather everything where there is none.
    """

    @property
    def name(self) -> str:
        """What the user writes to choose it."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def canonical(self) -> bool:
        """Whether sums add in rank order."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed flat buffer on which this transport is fastest, such as shared memory."""

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum the buffers of the ranks, in place: part `rank` of `size` equal parts then holds its sum.

        What the other parts hold afterwards is undefined.

        Args:
            buffer: contiguous, one-dimensional, its length a multiple of `size`.
            divisor: by which the sums are divided.
            accumulate: dtype of the sum; None: that of the buffer.
        """

    def all_gather(self, buffer: Tensor) -> Work:
        """Fill a buffer, in place: part `i` of `size` equal parts comes from rank `i`.

        Args:
            buffer: contiguous, one-dimensional, its length a multiple of `size`; its part `rank` is what is sent.
        """

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum the buffers of the ranks, in place; every rank gets the same bits.

        Args:
            buffer: contiguous, one-dimensional, of any length.
            divisor: by which the sums are divided.
            accumulate: dtype of the sum; None: that of the buffer.
        """

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Give the buffer of one rank of the group to all, in place.

        Args:
            buffer: contiguous, of any shape.
            source: rank in the group.
        """

    def close(self) -> None:
        """Give back what the transport holds, such as shared memory; its buffers must not be used any more."""
