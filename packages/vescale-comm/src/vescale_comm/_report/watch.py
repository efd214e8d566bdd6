"""Looks at collectives from their begin to the end of the wait for them, if anybody wants to know."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _hooks

if TYPE_CHECKING:
    from .._transport import Work
    from ..hookspecs import Timeline

__all__ = ["Event", "label", "stop_watching", "watch", "watch_for"]


@dataclass(slots=True)
class Event:
    """One collective."""

    operation: str
    """What was asked of the transport."""
    name: str
    """What it was for: the first and last of the tensors."""
    nbytes: int
    """Of the buffer, or on the wire where gradients are compressed."""
    begun: float
    """When it was asked for, in seconds of `time.perf_counter`."""
    wait_began: float = 0.0
    """When the wait for it began; 0: nobody has waited yet."""
    wait_ended: float = 0.0
    """When the wait for it ended; 0: it has not."""


_watchers: list[list[Event]] = []


def watch_for(events: list[Event]) -> None:
    """Have all collectives of this process appended to a list from now on."""
    _watchers.append(events)


def stop_watching(events: list[Event]) -> None:
    """Append no more to a list."""
    _watchers[:] = [one for one in _watchers if one is not events]


def label(names: Sequence[str]) -> str:
    """Return a short name for several tensors."""
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})" if names else "nothing"


def watch(
    work: Work,
    operation: str,
    name: Callable[[], str],
    nbytes: int | Callable[[], int],
    begun: float = 0.0,
    span: bool = True,
) -> Work:
    """Return a collective that was just begun, in a cover that looks at the clock if anybody watches.

    Args:
        work: the collective.
        operation: what it is.
        name: called for what it is for.
        nbytes: that it moves, or what to call for them at its end.
        begun: when it was asked for, in seconds of `time.perf_counter`; 0: now.
        span: whether it gets a span in the timeline.
    """
    line = _timeline() if span else None
    if not _watchers and line is None:
        return work
    event = Event(operation, name(), nbytes if isinstance(nbytes, int) else 0, begun or time.perf_counter())
    for events in _watchers:
        events.append(event)
    return _Watched(work, event, line, None if isinstance(nbytes, int) else nbytes)


@functools.cache
def _timeline() -> Timeline | None:
    return _hooks.timeline()


class _Watched:
    """A collective in its cover."""

    __slots__ = ("_event", "_line", "_nbytes", "_token", "_work")

    def __init__(self, work: Work, event: Event, line: Timeline | None, nbytes: Callable[[], int] | None) -> None:
        self._work, self._event, self._line, self._nbytes = work, event, line, nbytes
        self._token = None if line is None else line.begin("comm", f"{event.operation} {event.name}")

    def wait(self) -> None:
        """Finish it; only the first wait counts."""
        event = self._event
        if event.wait_began:
            self._work.wait()
            return
        event.wait_began = time.perf_counter()
        try:
            self._work.wait()
        finally:
            event.wait_ended = time.perf_counter()
            if self._nbytes is not None:
                event.nbytes = self._nbytes()
            line, self._line = self._line, None
            if line is not None:
                line.end(self._token)
