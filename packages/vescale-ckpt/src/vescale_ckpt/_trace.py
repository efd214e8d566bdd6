"""Spans for the recorder of time, if a plugin has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._hooks import timeline

__all__ = ["span"]


@contextmanager
def span(category: str, name: str) -> Iterator[None]:
    """Record what happens inside as a span of the category `ckpt.<category>`."""
    recorder = timeline()
    if recorder is None:
        yield
        return
    token = recorder.begin(f"ckpt.{category}", name)
    try:
        yield
    finally:
        recorder.end(token)
