"""Runs collectives over shared memory: each is a generator that yields the rank it waits for.

Whoever waits for one collective moves all others that are under way along too, so ranks may wait in different orders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from ..errors import CommError, MismatchError, TransportError
from .call import Call
from .shared_board import ARRIVED, DONE, SLOTS, Board, Place, Post
from .shared_places import Places

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Collective", "Engine", "Steps", "group_timeout"]

SLICE = 0.02
"""Seconds that a rank sleeps before it looks whether the others still live."""
SPINS = 100
"""Looks at a number before the rank goes to sleep: waking up takes about as long."""

Steps = Generator[int, None, None]


class Collective:
    """A collective under way on one rank."""

    def __init__(self, engine: Engine, number: int, call: Call, place: Place, staging: Tensor | None) -> None:
        self.number = number
        """How many came before it."""
        self.call = call
        """What was asked for."""
        self.place = place
        """Where this rank's numbers are."""
        self.staging = staging
        """Copy of the numbers in shared memory, lent to it."""
        self.ready = False
        """Whether the caller may go on with the buffer."""
        self.steps: Steps | None = None
        """None when all ranks are through."""
        self.lacking = -1
        """Rank that it waits for."""
        self.is_left = False
        """Whether the end of `steps` is not that of the collective: others still read staging memory of this rank."""
        self._engine = engine

    def wait(self) -> None:
        """Finish it; from any thread, any number of times.

        Raises:
            TransportError: a rank died, gave up, or did not come within the time-out.
            MismatchError: another rank came with something else.
        """
        if not self.ready:
            self._engine.wait(self)


class Engine:
    """The collectives of one transport."""

    def __init__(self, board: Board, places: Places, timeout: float) -> None:
        """Take what they need.

        Args:
            board: of the ranks.
            places: shared memory.
            timeout: seconds that a wait may take.
        """
        self.board, self.places, self._timeout = board, places, timeout
        self.rank, self.size = board.rank, board.size
        self.others = [(board.rank + step) % board.size for step in range(1, board.size)]
        self.lock = threading.RLock()
        self._number = 0
        self._under_way: dict[int, Collective] = {}
        self._error: CommError | None = None

    def start(
        self, call: Call, place: Place, steps: Callable[[Collective], Steps], staging: Tensor | None = None
    ) -> Collective:
        """Come to a collective.

        Args:
            call: what is asked for.
            place: where this rank's numbers are.
            steps: the collective.
            staging: shared memory to be given back when all ranks are through.
        """
        with self.lock:
            self.check()
            self._check_failure(f"rank {self.rank}: {call}")
            old = self._under_way.get(self._number - SLOTS)
            if old is not None:
                self._sleep_until(old, lambda: old.steps is None)
            run = Collective(self, self._number, call, place, staging)
            run.steps = steps(run)
            self._number += 1
            self._under_way[run.number] = run
            self.board.post(run.number, Post(call, place))
            self._progress()
            return run

    def wait(self, run: Collective) -> None:
        """Finish a collective of this rank."""
        self._sleep_until(run, lambda: run.ready)

    def check(self) -> None:
        """Raise the error that ended this transport, if one did."""
        if self._error is not None:
            raise self._error

    def fail(self, error: CommError) -> CommError:
        """End this transport on all ranks.

        Returns:
            The error, to be raised.
        """
        if self._error is None:
            self._error = error
            self._under_way.clear()
            self.board.give_up(str(error))
        return self._error

    def close(self) -> None:
        """End it on this rank."""
        with self.lock:
            self._error = self._error or TransportError(f"rank {self.rank}: the transport is closed.")
            self._under_way.clear()
            self.places.clear()

    # What collectives are made of.

    def until(self, peer: int, run: Collective, phase: int) -> Steps:
        """Wait until a rank has come to a phase."""
        while not self.board.reached(peer, run.number, phase):
            yield peer

    def arrive(self, run: Collective) -> Generator[int, None, list[Post]]:
        """Wait until all ranks have come, and return what they posted."""
        posts = []
        for peer in range(self.size):
            yield from self.until(peer, run, ARRIVED)
            posts.append(self.read(peer, run))
        return posts

    def read(self, peer: int, run: Collective) -> Post:
        """Return what a rank posted that has come.

        Raises:
            MismatchError: it asks for something else than this rank.
        """
        post = self.board.read(peer, run.number)
        if post.call != run.call:
            raise MismatchError(
                f"Collective {run.number} of the transport is {run.call} on rank {self.rank}, but {post.call} on "
                f"rank {peer}. Every rank must call the same collectives in the same order."
            )
        return post

    def view(self, peer: int, post: Post, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements of the numbers that a rank posted, without a copy."""
        place, size = post.place, dtype.itemsize
        shifted = Place(place.kind, place.serial, place.fd, place.nbytes, place.offset + start * size)
        return self.places.view(peer, shifted, stop - start, dtype)

    def leave(self, run: Collective, *, free: bool) -> Steps:
        """Tell that this rank touches no other rank's memory any more, and wait until that is so for all.

        Args:
            run: the collective.
            free: whether no other rank touches the caller's buffer, so that the caller need not wait.
        """
        self.board.mark(run.number, DONE)
        run.ready = run.is_left = free
        if not free:
            yield from self._left(run)

    def _left(self, run: Collective) -> Steps:
        """Wait until no rank touches another one's memory any more; it refers to no buffer of the caller."""
        for peer in self.others:
            yield from self.until(peer, run, DONE)
        if run.staging is not None:
            self.places.give_back(run.staging)
            run.staging = None

    # How they are run.

    def _progress(self) -> None:
        for run in list(self._under_way.values()):
            if run.steps is None:
                continue
            try:
                run.lacking = self._next(run, run.steps)
            except StopIteration:
                run.steps, run.ready = None, True
                del self._under_way[run.number]
            except (CommError, OSError, RuntimeError) as error:
                text = f"rank {self.rank}: collective {run.number}, {run.call}: {error}"
                raise self.fail(error if isinstance(error, MismatchError) else TransportError(text)) from error
            except BaseException:
                # Interrupted in the midst of a sum: nobody may go on with these numbers.
                text = f"rank {self.rank} was interrupted in collective {run.number}, {run.call}."
                self.fail(TransportError(text))
                raise

    def _next(self, run: Collective, steps: Steps) -> int:
        try:
            return next(steps)
        except StopIteration:
            if not run.is_left:
                raise
        # Whoever has the result may free its buffer, and can tell that nobody else has it.
        run.is_left, run.steps = False, self._left(run)
        return next(run.steps)

    def _sleep_until(self, run: Collective, condition: Callable[[], bool]) -> None:
        board = self.board
        end = time.monotonic() + self._timeout
        peer = run.lacking
        while True:
            # Read before the look at phases: what changes after the look changes this number as well.
            seen = board.event(peer) if peer >= 0 else 0
            with self.lock:
                if not condition():
                    self.check()
                    self._progress()
                if condition():
                    return
            if run.lacking != peer:
                peer = run.lacking
                continue
            for _ in range(SPINS):
                if board.event(peer) != seen:
                    break
            else:
                before = time.monotonic()
                board.sleep(peer, seen, SLICE)
                now = time.monotonic()
                if now - before >= SLICE:
                    self._look_around(run, peer, now > end)

    def _check_failure(self, at: str) -> None:
        failure = self.board.failure()
        if failure is not None:
            raise self.fail(TransportError(f"{at}: rank {failure[0]} gave up: {failure[1]}"))

    def _look_around(self, run: Collective, peer: int, late: bool) -> None:
        with self.lock:
            at = f"rank {self.rank}: collective {run.number}, {run.call}"
            self._check_failure(at)
            alive = self.board.is_alive(peer)
            # It may have ended after it did its part.
            self._progress()
            if run.steps is None or run.lacking != peer:
                return
            if not alive:
                pid = self.board.pids[peer]
                raise self.fail(TransportError(f"{at}: rank {peer} (process {pid}) ended before it came to this."))
            if late:
                raise self.fail(
                    TransportError(
                        f"{at}: rank {peer} did not come within {self._timeout:g} s. It is stuck, much slower, or "
                        "calls fewer collectives than this rank."
                    )
                )


def group_timeout(group: ProcessGroup) -> timedelta:
    """Return the time-out of a process group; torch has no public name for it."""
    try:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout
    return found
