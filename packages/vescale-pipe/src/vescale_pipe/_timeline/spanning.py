"""Spans of user code: around a block on the host, or around what a block starts on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from .recorder import recorder

__all__ = ["device_span", "span"]


class _Open:
    """A span around a block; recorded when it ends."""

    __slots__ = ("_category", "_name", "_start", "_tags")

    def __init__(self, category: str, name: str, tags: dict[str, Any]) -> None:
        self._category, self._name, self._tags = category, name, tags

    def __enter__(self) -> None:
        self._start = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = perf_counter_ns()
        ring = recorder.ring
        if ring is None:
            return
        tags = self._tags
        if kind is not None:
            tags["error"] = kind.__name__
        # As `Recorder.add`, without a call: spans of users should cost no more than half a microsecond.
        number = next(ring.numbers)
        ring.spans[number & ring.mask] = (
            number,
            self._category,
            self._name,
            recorder.step,
            recorder.thread.number,
            tags,
            self._start,
            now,
        )


_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def span(category: str, name: str, **tags: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that records what is done inside; it costs next to nothing if no recording runs.

    Args:
        category: of spans that belong together, such as "data".
        name: what is done.
        tags: numbers and short texts to keep with it. An exception that leaves the block is noted as "error".

    Example:
        >>> with span("data", "load", rows=8):
        ...     pass
    """
    return _nothing if recorder.ring is None else _Open(category, name, tags)


@contextlib.contextmanager
def _on_device(category: str, name: str, tags: dict[str, Any]) -> Iterator[None]:
    spans = recorder.device
    token = spans.begin(category, name, tags)
    try:
        yield
    except BaseException as error:
        tags["error"] = type(error).__name__
        raise
    finally:
        spans.end(token)


def device_span(category: str, name: str, **tags: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context like `span`, for what is started inside on the current stream of a GPU.

    If the recording has no GPU, it is a span of the host.
    """
    return span(category, name, **tags) if recorder.device is None else _on_device(category, name, tags)
