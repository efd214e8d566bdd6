"""Ranks that run out of data at different times: those that are done go on with zero gradients of zero weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .._transport import Transport
from ..errors import MismatchError, TransportError

if TYPE_CHECKING:
    from .replica import Replica

__all__ = ["Joining", "join"]

DONE, ADDS, SYNCS, FAILED = 0, 1, 2, 3
"""A rank has no data; its backward is under no_sync, or one that reduces; it left by an error."""


class Joining:
    """What ranks tell each other before each forward.

    Args:
        transport: over the ranks that see different data.
        device: on which the transport works.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._buffer = torch.zeros(transport.size, dtype=torch.uint8, device=device)
        self.over = False
        """Whether all ranks know of an error."""

    def announce(self, syncs: bool) -> int:
        """Say that a forward comes, and return the first rank that has data.

        Args:
            syncs: whether the backward of it reduces.

        Raises:
            MismatchError: other ranks are elsewhere in a window, or one left by an error.
        """
        states = self.tell(SYNCS if syncs else ADDS)
        return next(rank for rank, state in enumerate(states) if state != DONE)

    def tell(self, state: int) -> list[int]:
        """Say a state, and return those of all ranks.

        Raises:
            MismatchError: see `announce`; it is raised on all ranks.
        """
        self._buffer[self._transport.rank] = state
        self._transport.all_gather(self._buffer).wait()
        states: list[int] = self._buffer.tolist()
        failed, syncing, adding = ([r for r, one in enumerate(states) if one == kind] for kind in (FAILED, SYNCS, ADDS))
        self.over = bool(failed) or bool(syncing and adding)
        if failed and state != FAILED:
            raise MismatchError(f"Ranks {failed} left join() by an error; see what they raised.")
        if syncing and adding and not failed:
            raise MismatchError(
                f"Inside join(), ranks {syncing} are about to reduce, but ranks {adding} are under no_sync(): all with "
                "data must accumulate over the same number of micro-batches."
            )
        return states


@contextmanager
def join(replica: Replica, joining: Joining, step: Callable[[], object]) -> Iterator[None]:
    """Run the loop inside; then go on with zeros until all ranks are done.

    Args:
        replica: whose gradients are reduced.
        joining: its talk.
        step: what follows each reduction.
    """
    try:
        yield
    except BaseException as error:
        if not (joining.over or isinstance(error, TransportError)):
            joining.tell(FAILED)
        raise
    reducer, weight = replica.reducer, replica.reducer.weight
    while True:
        states = joining.tell(DONE)
        active = [rank for rank, state in enumerate(states) if state != DONE]
        if not active:
            return
        fresh = reducer.idle
        if fresh:
            for bucket in reducer.buckets:
                bucket.drop_results()
        reducer.prepare()
        if fresh:
            replica.sync_buffers(active[0])
        if states[active[0]] == SYNCS:
            idle = all(param.grad is None for bucket in reducer.buckets for param in bucket.parameters)
            reducer.weight = 0.0 if idle else weight
            reducer.finish(now=True)
            step()
