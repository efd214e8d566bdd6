"""Collectives in several steps, of which later ones begin in `wait`: those of one owner finish in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from .._transport import Work
from ..errors import TransportError

__all__ = ["Ordered", "Steps"]

Steps = Iterator[Work]


class Ordered:
    """A collective that goes through steps."""

    def __init__(self, steps: Steps, before: Ordered | None) -> None:
        """Begin the first step.

        Args:
            steps: yields what is to be waited for before it goes on.
            before: the collective that was begun before, and is finished first: so all ranks begin later steps in the
                same order, whatever they wait for first.
        """
        self._steps: Steps | None = steps
        self._before = before
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._work: Work | None = None
        self._advance()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, or nothing can be done any more."""
        return self._steps is None

    def wait(self) -> None:
        """Finish it; see `Work`."""
        chain: list[Ordered] = []
        one: Ordered | None = self
        while one is not None:
            chain.append(one)
            one = one._before
        for one in reversed(chain):
            one._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            while self._steps is not None:
                self._advance()
            self._before = None

    def _advance(self) -> None:
        assert self._steps is not None
        try:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._steps)
        except StopIteration:
            self._steps = self._work = None
        except Exception as error:
            self._steps = self._work = None
            self._error = error
            raise
        except BaseException as error:
            self._steps = self._work = None
            self._error = TransportError(f"The reduction was interrupted by {type(error).__name__}.")
            raise
