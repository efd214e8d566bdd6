"""A transport whose messages are recorded: both when they were asked for and when they were there."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from .._transport import Receiving, Sending, Transport
from .recorder import Recorder, recorder

__all__ = ["RecordedTransport"]


class _Recorded:
    """A message under way."""

    __slots__ = ("_direction", "_message", "_owner", "_peer", "_posted", "_step", "_tag")

    def __init__(self, owner: RecordedTransport, message: Any, direction: str, peer: int, tag: int) -> None:
        self._posted = perf_counter_ns()
        self._owner, self._message, self._direction, self._peer, self._tag = owner, message, direction, peer, tag
        self._step = owner.recorder.step

    def ready(self) -> bool:
        return bool(self._message.ready())

    def wait(self) -> Any:
        asked = perf_counter_ns()
        values = self._message.wait()
        done = perf_counter_ns()
        self._owner.tell(self._direction, self._peer, self._tag, self._posted, done, done - asked, self._step)
        return values


class RecordedTransport:
    """A transport around another one; while nothing is recorded, it costs one test a message.

    Args:
        inner: does the work.
        ranks: numbers in the world of the ranks of the pipeline; None: the same numbers.
        into: the recorder.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int] | None = None, into: Recorder = recorder) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.recorder = into
        self._world = tuple(range(inner.size)) if ranks is None else tuple(ranks)
        self._names: dict[int, str] = {}

    @property
    def label(self) -> Any:
        """What the message of a tag is."""
        return self.inner.label

    @label.setter
    def label(self, label: Any) -> None:
        if label is not self.inner.label:
            self._names.clear()
        self.inner.label = label

    def send(self, dst: int, tag: int, values: Sequence[Any]) -> Sending:
        """Start to send; see `Transport.send`."""
        if self.recorder.ring is None:
            return self.inner.send(dst, tag, values)
        # The time is read first: a message must not be there before it left.
        recorded = _Recorded(self, None, "send", dst, tag)
        recorded._message = self.inner.send(dst, tag, values)
        return recorded

    def recv(self, src: int, tag: int) -> Receiving:
        """Start to receive; see `Transport.recv`."""
        if self.recorder.ring is None:
            return self.inner.recv(src, tag)
        recorded = _Recorded(self, None, "recv", src, tag)
        recorded._message = self.inner.recv(src, tag)
        return recorded

    def abort(self, error: str) -> None:
        """End all channels; see `Transport.abort`."""
        self.inner.abort(error)

    def close(self) -> None:
        """End all channels in peace."""
        self.inner.close()

    def tell(self, direction: str, peer: int, tag: int, posted: int, done: int, blocked: int, step: int) -> None:
        """Record a message that is over."""
        name = self._names.get(tag)
        if name is None:
            name = self._names[tag] = self.inner.label(tag)
        self.recorder.message(direction, self._world[peer], tag, posted, done, name=name, blocked=blocked, step=step)
