"""The first failure of a pipeline, told through the store that the process group was made with.

A rank that fails writes what happened, then closes its connections. Ranks that wait for it wake up at once, read it
here, and close theirs.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ..errors import RankError

__all__ = ["FailureBoard", "rank_error"]


def rank_error(rank: int, text: str, here: int, what: str) -> RankError:
    r"""Return what a rank raises because another one failed.

    Args:
        rank: that failed.
        text: what it said: where and why in the first line, then more.
        here: rank that learns it.
        what: that this one waited for.

    Example:
        >>> print(rank_error(1, "at 1F0: ValueError: no\nTraceback ...", 0, "the loss"))
        rank 1 failed at 1F0: ValueError: no
        (rank 0 waited for the loss)
        Traceback ...
    """
    first, _, rest = text.partition("\n")
    more = f"\n{rest}" if rest else ""
    return RankError(f"rank {rank} failed {first}\n(rank {here} waited for {what}){more}", rank)


class FailureBoard:
    """Where the first failure stands.

    Args:
        store: of this pipeline alone.
        rank: of this process in the pipeline.
        size: ranks of the pipeline.
        keeps: whether the store may live in this process and end with it.
    """

    def __init__(self, store: Store, rank: int, size: int, keeps: bool = True) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._size = size
        self._knows = False
        self._keeps = keeps
        self.lost = False
        """Whether the store has gone, with the process that kept it."""

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
            else:
                self._read(store)  # who failed by itself needs not be told
        except RuntimeError as error:
            self._lose(error)  # there is nobody left to tell

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
            self._read(store)
        except RuntimeError as error:
            self._lose(error)
            return None
        return int(rank), text

    def _read(self, store: Store) -> None:
        if not self._knows:
            self._knows = True
            store.add("read", 1)

    def await_readers(self, seconds: float) -> None:
        """Where the store may live in this process, which is about to end: wait until the other ranks have read.

        Args:
            seconds: longest wait.
        """
        store = self._store if self._keeps else None
        end = time.monotonic() + seconds
        try:
            while store is not None and time.monotonic() < end and store.add("read", 0) < self._size - 1:
                time.sleep(0.01)
        except RuntimeError as error:
            self._lose(error)

    def _lose(self, error: RuntimeError) -> None:
        self._store = None
        self.lost = "timeout" not in str(error).lower()
