"""The recorder of this process: the few lines that run in the middle of a training step.

Off, a span costs one test. On, it costs two readings of the clock, a number, and a tuple in a ring.
"""

from __future__ import annotations

import itertools
import os
import threading
from time import perf_counter_ns
from typing import Any

from .ring import Ring, Token

__all__ = ["COMPUTE", "MESSAGE", "MESSAGES", "Recorder", "recorder"]

COMPUTE = "compute"
"""Category of the actions of a schedule."""
MESSAGE = "message"
"""Category of messages between stages."""
MESSAGES = -1
"""Track of messages: they overlap with what threads do."""


class _Track(threading.local):
    """A number for each thread, never used again, and its name."""

    numbers = itertools.count()

    def __init__(self, names: dict[int, str]) -> None:
        self.number = next(_Track.numbers)
        names[self.number] = threading.current_thread().name


class Recorder:
    """Records spans of time while a recording is on; one per process.

    It is what siblings get by the hook `vescale_timeline`: they may keep it for good, on or off.
    """

    __slots__ = ("device", "ring", "step", "thread", "tracks")

    def __init__(self) -> None:
        self.ring: Ring | None = None
        """Where spans go; None: nowhere."""
        self.tracks: dict[int, str] = {MESSAGES: "messages"}
        """Name of each track: of threads, streams, messages."""
        self.thread = _Track(self.tracks)
        """Number of the track of each thread, as its own attribute."""
        self.step = 0
        """Number of the training step, which is noted with each span."""
        self.device: Any = None
        """Spans on a GPU, if they are recorded."""

    @property
    def on(self) -> bool:
        """Whether spans are being recorded."""
        return self.ring is not None

    def use(self, ring: Ring | None) -> None:
        """Record into a ring from now on; None: record nothing."""
        self.ring = ring

    def begin(self, category: str, name: str, tags: dict[str, Any] | None = None) -> Token | None:
        """Open a span on this thread.

        Args:
            category: such as "communication".
            name: what is done.
            tags: what else is known; may be changed until the span has ended.

        Returns:
            A token for `end`; None if nothing is recorded.
        """
        ring = self.ring
        if ring is None:
            return None
        number = next(ring.numbers)
        place = number & ring.mask
        # In this order `drain` never sees the end of another span beside a token.
        ring.ends[place] = 0
        token = (number, category, name, self.step, self.thread.number, tags, perf_counter_ns())
        ring.spans[place] = token
        return token

    def end(self, token: Any) -> None:
        """Close the span of a token, on any thread; None, and tokens of a recording that is over, are let go."""
        if token is None:
            return
        now = perf_counter_ns()
        ring = self.ring
        if ring is not None:
            place = token[0] & ring.mask
            if ring.spans[place] is token:
                ring.ends[place] = now

    def add(
        self,
        category: str,
        name: str | None,
        start: int,
        end: int,
        tags: Any = None,
        *,
        step: int | None = None,
        track: int | None = None,
    ) -> None:
        """Add a span that is over.

        Args:
            category: as in `begin`.
            name: as in `begin`; None: an action, whose kind, stage and micro-batch `tags` holds.
            start: `time.perf_counter_ns` when it began.
            end: and when it ended.
            tags: as in `begin`.
            step: of training; None: the current one.
            track: that it is drawn on; None: the one of this thread.
        """
        ring = self.ring
        if ring is None:
            return
        number = next(ring.numbers)
        place = number & ring.mask
        step = self.step if step is None else step
        track = self.thread.number if track is None else track
        ring.spans[place] = (number, category, name, step, track, tags, start, end)

    def action(self, kind: int, stage: int, microbatch: int, start: int, end: int) -> None:
        """Add an action of a schedule; takes what the runtime tells of each.

        Args:
            kind: a `Kind`.
            stage: its number.
            microbatch: its number.
            start: `time.perf_counter_ns` when it began.
            end: and when it ended.
        """
        ring = self.ring
        if ring is None:
            return
        number = next(ring.numbers)
        place = number & ring.mask
        tags = kind, stage, microbatch
        ring.spans[place] = (number, COMPUTE, None, self.step, self.thread.number, tags, start, end)

    def message(
        self,
        direction: str,
        peer: int,
        key: Any,
        posted: int,
        done: int,
        *,
        name: str = "",
        blocked: int = 0,
        num_bytes: int | None = None,
        step: int | None = None,
    ) -> None:
        """Add a message, on either of its ends.

        Args:
            direction: "send" or "recv".
            peer: rank of the other end, as the file of that rank says.
            key: what both ends call it; of messages of one step between two ranks with one key, the first that is
                sent is the first that is received.
            posted: `time.perf_counter_ns` when it was asked for.
            done: and when it had been sent, or was here.
            name: for people.
            blocked: nanoseconds until `done` in which the rank did nothing but wait for it.
            num_bytes: its size, if known.
            step: of training, in which it was posted; None: the current one.
        """
        if self.ring is None:
            return
        tags = {"direction": direction, "peer": peer, "key": key, "blocked": blocked}
        if num_bytes is not None:
            tags["bytes"] = num_bytes
        self.add(MESSAGE, name or direction, posted, done, tags, step=step, track=MESSAGES)

    def new_track(self, name: str) -> int:
        """Return the number of a new track, such as for a stream of a GPU."""
        number = next(_Track.numbers)
        self.tracks[number] = name
        return number


recorder = Recorder()
"""The one of this process."""

if hasattr(os, "register_at_fork"):
    # A child has none of the threads and shares the files: what it does is not part of the recording.
    os.register_at_fork(after_in_child=lambda: recorder.use(None))
