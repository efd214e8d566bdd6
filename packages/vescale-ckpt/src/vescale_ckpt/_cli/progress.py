"""A progress bar on standard error, for long work on a terminal; nothing where nobody looks."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from .tables import size

__all__ = ["Bar"]

WIDTH = 30
PAUSE = 0.1
"""Seconds between two drawings."""


class Bar:
    """Draws how much is done; call it with (bytes done, bytes in total) from any thread.

    Args:
        what: word before the bar.
        stream: where to; standard error by default.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._drawn: float | None = None
        self._length = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()

    def __call__(self, done: int, total: int) -> None:
        """Draw, unless the last drawing is only just there."""
        if not self._shown:
            return
        now = time.monotonic()
        with self._lock:
            if self._drawn is not None and now - self._drawn < PAUSE:
                return
            self._drawn = now
            text = self._text(done, total, now - self._begun)
            self._stream.write("\r" + text.ljust(self._length))
            self._stream.flush()
            self._length = max(self._length, len(text))

    def _text(self, done: int, total: int, seconds: float) -> str:
        part = min(1.0, done / total) if total else 0.0
        bar = ("#" * int(part * WIDTH)).ljust(WIDTH, ".")
        speed = f", {size(int(done / seconds))}/s" if seconds > 0 else ""
        return f"{self._what} [{bar}] {part:4.0%} {size(done)} of {size(total)}{speed}"
