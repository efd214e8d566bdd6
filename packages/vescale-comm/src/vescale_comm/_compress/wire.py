"""Collectives for compressors, counted, and works made of several of them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from .._transport import Transport, Work
from ..errors import TransportError

__all__ = ["LAG", "Staged", "Steps", "Wire"]

Steps = Iterator[Work]

LAG = 2
"""Reductions that may be started before the first of them goes on to its next collective. All ranks start reductions in
the same order, so that they call the same collectives in the same order, and long before anybody waits for the last."""


class Wire:
    """A transport whose bytes are counted.

    Args:
        transport: the transport.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.sent = 0
        """Bytes that this rank sent to others, where parts go straight to the ranks they are for."""

    def all_reduce(self, buffer: Tensor, divisor: float) -> Work:
        """Sum buffers."""
        self.sent += 2 * buffer.nbytes * (self.size - 1) // self.size
        return self.transport.all_reduce(buffer, divisor=divisor)

    def reduce_scatter(self, buffer: Tensor, divisor: float) -> Work:
        """Sum parts at their owners."""
        self.sent += buffer.nbytes * (self.size - 1) // self.size
        return self.transport.reduce_scatter(buffer, divisor=divisor)

    def all_gather(self, rows: Tensor) -> Work:
        """Fill row `i` from rank `i`.

        Args:
            rows: contiguous, a row per rank, of which the own one is sent.
        """
        self.sent += rows[self.rank].nbytes * (self.size - 1)
        return self.transport.all_gather(rows.view(-1))

    def all_to_all(self, rows: Tensor) -> tuple[Work, Tensor]:
        """Send row `i` to rank `i`.

        A transport without all_to_all, such as one whose ranks see each other's memory anyway, gathers all rows.

        Args:
            rows: contiguous, a row per rank.

        Returns:
            The work, and what holds the rows that came, by rank, once it is finished.
        """
        swap = getattr(self.transport, "all_to_all", None)
        if swap is not None:
            self.sent += rows[0].nbytes * (self.size - 1)
            came = torch.empty_like(rows)
            work: Work = swap(rows.view(-1), came.view(-1))
            return work, came
        everything = rows.new_empty((self.size, *rows.shape))
        everything[self.rank].copy_(rows)
        return self.all_gather(everything), everything[:, self.rank]


class Staged:
    """A reduction of several collectives, one after the other.

    Args:
        steps: yields what has to be finished before it goes on; it begins now.
        transport: over which the collectives go.
    """

    def __init__(self, steps: Steps, transport: Transport) -> None:
        self._steps = steps
        self._error: TransportError | None = None
        self._lock = threading.Lock()
        self._work = next(steps, None)
        behind = _under_way.setdefault(transport, deque())
        behind.append(self)
        if len(behind) > LAG:
            behind.popleft().advance()

    def wait(self) -> None:
        """Finish it; from any thread, any number of times.

        Raises:
            TransportError: a collective failed; each further call raises it again.
        """
        while self._work is not None:
            self.advance()
        if self._error is not None:
            raise self._error

    def advance(self) -> None:
        """Wait for the collective under way, and start the next one; what failed is told in `wait`."""
        with self._lock:
            if self._work is None:
                return
            try:
                self._work.wait()
                self._work = next(self._steps, None)
            except TransportError as error:
                self._error, self._work = error, None
            except BaseException as error:
                # Steps that were left in the middle do not go on, so what is in the buffer is no sum.
                self._error, self._work = TransportError(f"The reduction was interrupted by {error!r}."), None
                raise


_under_way: weakref.WeakKeyDictionary[Transport, deque[Staged]] = weakref.WeakKeyDictionary()
"""Per transport the reductions that were started last."""
