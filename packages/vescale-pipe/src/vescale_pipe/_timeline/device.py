"""Spans on a GPU: pairs of events on a stream, turned into times of the host when they are fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .recorder import Recorder
from .ring import Raw, Token

__all__ = ["DeviceSpans"]


class DeviceSpans:
    """Records spans of one GPU.

    An event on a stream costs about a microsecond and makes nobody wait. At a flush, one more event is recorded on a
    stream that does nothing else, and waited for: it ties the clock of the GPU to that of the host.

    Args:
        recorder: knows steps and tracks.
        device: a GPU.
        capacity: spans under way; the oldest are dropped if there are more, and counted.
        make_event: makes an event; None: those of `torch.cuda`.
        make_anchor: makes an event that has just happened; None: on a stream of its own.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: Any,
        capacity: int,
        make_event: Callable[[], Any] | None = None,
        make_anchor: Callable[[], Any] | None = None,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._capacity = capacity
        self._make_event = make_event or self._cuda_event
        self._make_anchor = make_anchor or self._cuda_anchor
        self._pool: list[Any] = []
        self._open: deque[tuple[Token, Any, Any]] = deque()
        self._track = recorder.new_track(f"GPU {device}")
        self._stream: Any = None
        self.dropped = 0
        """Spans that were lost for want of room."""

    def begin(self, category: str, name: str | None, tags: Any = None) -> tuple[Token, Any, Any]:
        """Open a span of what is started on the current stream from now on; arguments as in `Recorder.begin`."""
        first, last = self._event(), self._event()
        token: Token = (0, category, name, self._recorder.step, self._track, tags, perf_counter_ns())
        first.record()
        return token, first, last

    def end(self, span: tuple[Token, Any, Any]) -> None:
        """Close a span."""
        span[2].record()
        if len(self._open) >= self._capacity:
            _, first, last = self._open.popleft()
            self._pool += (first, last)
            self.dropped += 1
        self._open.append(span)

    def resolve(self, wait: bool = False) -> list[Raw]:
        """Return the spans that the GPU has ended, in the order in which they were started.

        Args:
            wait: until all have.
        """
        if not self._open:
            return []
        anchor = self._make_anchor()
        now = perf_counter_ns()
        found: list[Raw] = []
        while self._open:
            token, first, last = self._open[0]
            if wait:
                last.synchronize()
            elif not last.query():
                break
            self._open.popleft()
            # Events give milliseconds from one to another; after the anchor they are negative.
            start = now - round(first.elapsed_time(anchor) * 1e6)
            end = now - round(last.elapsed_time(anchor) * 1e6)
            found.append(((*token[:6], start), max(start, end)))
            self._pool += (first, last)
        return found

    def _event(self) -> Any:
        return self._pool.pop() if self._pool else self._make_event()

    def _cuda_event(self) -> Any:
        import torch

        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _cuda_anchor(self) -> Any:
        import torch

        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()
        return event
