"""The first failure of a pipeline, told through the store that the process group was made with.

A rank that fails writes what happened, then closes its connections. Ranks that wait for it wake up at once, read it
here, and close theirs.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

__all__ = ["FailureBoard"]


class FailureBoard:
    """Where the first failure stands.

    Args:
        store: of this pipeline alone.
        rank: of this process in the pipeline.
        size: ranks of the pipeline.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._size = size

    def publish(self, text: str) -> None:
        """Write what happened, unless another rank was faster.

        Args:
            text: for people.
        """
        store = self._store
        if store is None:
            return
        try:
            if store.add("failures", 1) == 1:
                store.set("first", f"{self._rank}\n{text}")
        except RuntimeError:
            self._store = None  # the store went with its process: there is nobody left to tell

    def first(self) -> tuple[int, str] | None:
        """Return rank and text of the first failure; None if none is known."""
        store = self._store
        if store is None:
            return None
        try:
            if store.add("failures", 0) == 0:
                return None
            store.wait(["first"], timedelta(seconds=2))
            rank, _, text = store.get("first").decode().partition("\n")
            store.add("read", 1)
        except RuntimeError:
            self._store = None
            return None
        return int(rank), text

    def await_readers(self, seconds: float) -> None:
        """Wait until the other ranks have read, for the store may live in this process, which is about to end.

        Args:
            seconds: longest wait.
        """
        store = self._store
        end = time.monotonic() + seconds
        try:
            while store is not None and time.monotonic() < end and store.add("read", 0) < self._size - 1:
                time.sleep(0.01)
        except RuntimeError:
            self._store = None
