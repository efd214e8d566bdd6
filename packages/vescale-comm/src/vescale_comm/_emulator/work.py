"""Handles of emulated collectives: waiting for one gives the turn to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .world import PLACE

__all__ = ["EmulatedWork"]


class EmulatedWork(dist.Work):
    """What the emulated group returns; the same calls as on any work of torch.distributed."""

    def __init__(
        self, ready: Callable[[], bool], complete: Callable[[], list[Tensor]], what: Callable[[], str]
    ) -> None:
        """Take how to finish.

        Args:
            ready: whether nothing is missing any more.
            complete: writes the results, and returns the tensors it wrote.
            what: what is missing, in words.
        """
        super().__init__()
        self._ready, self._complete, self._what = ready, complete, what
        self._run, self._rank = PLACE.run, PLACE.rank
        self._tensors: list[Tensor] | None = None
        self._sender = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the work is finished, then write its results.

        Args:
            timeout: not needed: what cannot come is found as a deadlock.

        Raises:
            DeadlockError: no rank can run any more.
            RuntimeError: the thread is not that of the rank.
        """
        if self._tensors is None:
            self._check_thread()
            self._run.turns.wait(self._rank, self._ready, self._what)
            self._tensors = self._complete()
        return True

    def is_completed(self) -> bool:
        """Tell whether the work is finished; if not, let other ranks run once."""
        if self._tensors is None and not self._ready():
            self._check_thread()
            self._run.turns.poll(self._rank, self._what)
        if self._tensors is None and self._ready():
            self.wait()
        return self._tensors is not None

    def is_success(self) -> bool:
        """Tell whether the work is finished: an emulated work that fails raises at once."""
        return self._tensors is not None

    def exception(self) -> Any:
        """Return None; see `is_success`."""
        return None

    def result(self) -> list[Tensor]:
        """Return the tensors that were written."""
        self.wait()
        return list(self._tensors or ())

    def synchronize(self) -> None:
        """Wait; there are no streams."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait; there are no streams."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank of the group that sent; for receives."""
        return self._sender

    def _source_rank(self) -> int:
        return self._sender

    def get_future(self) -> Any:
        """Wait, and return a finished future: whoever waits for a future blocks its thread, which has the turn."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors or ()))
        return future

    def _check_thread(self) -> None:
        if PLACE.run is not self._run or PLACE.rank != self._rank:
            raise RuntimeError(
                f"A work of emulated rank {self._rank} must be waited for by the thread of that rank: "
                "threads that a rank starts have no turns."
            )
