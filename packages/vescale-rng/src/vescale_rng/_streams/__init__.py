"""The stream of a generator: its state, where it stands, and how to move it without drawing."""

from __future__ import annotations

from .advance import advance_words
from .stream import Stream

__all__ = ["Stream", "advance_words"]
