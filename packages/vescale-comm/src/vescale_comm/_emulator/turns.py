"""Ranks as threads that take turns: one runs until it has to wait for another, so every run is the same run.

Since only one of them runs at any time, what they share needs no locks.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from ..errors import CommError

__all__ = ["DeadlockError", "RankAborted", "Turns"]

POLLS = 1000
WATCH_SECONDS = 0.5


class DeadlockError(CommError):
    """Every rank waits for another one; the text says for what."""


class RankAborted(BaseException):
    """Ends a rank whose fellow failed; not an `Exception`, so that no rank goes on by catching it."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """Why a rank does not run."""

    ready: Callable[[], bool]
    """Whether it may go on."""
    what: Callable[[], str]
    """For what it waits."""
    expires: bool = False
    """Whether it gives up where nothing else can run."""


class Turns:
    """Hands the turn from rank to rank, always to the next one that can run."""

    def __init__(self, size: int, switch: Callable[[int | None, int | None], None]) -> None:
        """Prepare; nobody runs yet.

        Args:
            size: number of ranks.
            switch: called with the rank that ran and the one that will, to exchange what they do not share.
        """
        self.size = size
        self.failure: tuple[int | None, BaseException] | None = None
        self._switch = switch
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[_Wait | None] = [None] * size
        self._done = [False] * size
        self._threads: list[threading.Thread | None] = [None] * size
        self._ended = threading.Event()
        self._running: int | None = None
        self._turns = 0
        self._polls = 0

    def enter(self, rank: int) -> None:
        """Wait for the first turn; called by the thread of the rank."""
        self._threads[rank] = threading.current_thread()
        self._gates[rank].acquire()
        self._check()

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """End a rank and hand over the turn; called last by its thread.

        Args:
            rank: that ends.
            error: what ended it; the first one ends all ranks.
        """
        if error is not None:
            self.fail(rank, error)
        self._done[rank], self._waits[rank] = True, None
        following = self._following(rank)
        if following is None and not all(self._done):
            self.fail(None, DeadlockError(f"The ranks that still run wait for one that has ended:\n{self.report()}"))
            following = self._following(rank)
        if following is None:
            self._switch(rank, None)
            self._ended.set()
        else:
            self._hand(rank, following)

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Let all ranks end; the first error counts."""
        if self.failure is None and not isinstance(error, RankAborted):
            self.failure = (rank, error)

    def progress(self) -> None:
        """Note that a rank did something others may wait for."""
        self._polls = 0

    def wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str], expires: bool = False) -> bool:
        """Let others run until `ready` holds; called by the thread of the rank.

        Args:
            rank: that waits.
            ready: whether it may go on.
            what: for what it waits, in words.
            expires: whether it gives up where nothing else can run, as if its time had run out.

        Returns:
            Whether `ready` holds.

        Raises:
            DeadlockError: no rank can run.
            RankAborted: another rank failed.
        """
        self._check()
        if ready():
            return True
        self._waits[rank] = _Wait(ready, what, expires)
        following = self._following(rank)
        if following is None:
            error = DeadlockError(f"Every rank waits for another one:\n{self.report()}")
            self.fail(rank, error)
            raise error
        self._hand(rank, following)
        self._gates[rank].acquire()
        self._waits[rank] = None
        self._check()
        if not ready():
            self._count_poll(rank, what)
            return False
        return True

    def poll(self, rank: int, what: Callable[[], str]) -> None:
        """Let others run once; called where a rank asks whether something has come.

        Raises:
            DeadlockError: ranks have been asking many times and nothing moves any more.
            RankAborted: another rank failed.
        """
        self._check()
        self._count_poll(rank, what)
        self._waits[rank] = _Wait(lambda: True, what)
        following = self._following(rank)
        if following is not None and following != rank:
            self._hand(rank, following)
            self._gates[rank].acquire()
        self._waits[rank] = None
        self._check()

    def _count_poll(self, rank: int, what: Callable[[], str]) -> None:
        self._polls += 1
        if self._polls > POLLS * self.size:
            self._waits[rank] = _Wait(lambda: True, what)
            error = DeadlockError(f"Ranks ask again and again for something that does not come:\n{self.report()}")
            self.fail(rank, error)
            raise error

    def run(self, timeout: float) -> None:
        """Give the first turn to rank 0 and wait until all ranks have ended; called by the thread that started them.

        Args:
            timeout: seconds that one turn may take.

        Raises:
            TimeoutError: one took longer; the text has the stack of the rank. Its thread cannot be ended.
        """
        self._hand(None, 0)
        seen, since = self._turns, time.monotonic()
        while not self._ended.wait(WATCH_SECONDS):
            if self._turns != seen:
                seen, since = self._turns, time.monotonic()
            elif time.monotonic() - since > timeout:
                running = self._running
                text = "".join(traceback.format_stack(self._frame(running))[-8:]) if running is not None else ""
                error = TimeoutError(
                    f"Emulated rank {running} has had the turn for {timeout:g} s. It computes, or it waits for "
                    f"something that the emulator does not know, such as a lock or a real process group:\n{text}"
                )
                self.fail(running, error)
                raise error

    def report(self) -> str:
        """Return a line for every rank that has not ended: for what it waits, and where in the program."""
        lines = []
        for rank in range(self.size):
            wait = self._waits[rank]
            if self._done[rank]:
                lines.append(f"  rank {rank}: has ended")
            elif wait is None:
                lines.append(f"  rank {rank}: can run")
            else:
                lines.append(f"  rank {rank}: waits for {wait.what()}{_place(self._frame(rank))}")
        return "\n".join(lines)

    def _check(self) -> None:
        if self.failure is not None:
            raise RankAborted

    def _following(self, rank: int) -> int | None:
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if self._done[other]:
                continue
            wait = self._waits[other]
            if self.failure is not None or wait is None or wait.ready():
                return other
        for other in range(self.size):
            wait = self._waits[other]
            if not self._done[other] and wait is not None and wait.expires:
                return other
        return None

    def _hand(self, rank: int | None, following: int) -> None:
        self._turns += 1
        self._running = following
        self._switch(rank, following)
        self._gates[following].release()

    def _frame(self, rank: int | None) -> FrameType | None:
        thread = self._threads[rank] if rank is not None else None
        return sys._current_frames().get(thread.ident or 0) if thread is not None else None


def _place(frame: FrameType | None) -> str:
    """Return where the user's program stands: the innermost frame that is neither torch's nor of this package."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "vescale_comm.", "threading", "contextlib")):
            return f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
