"""What a rank recorded, as data: spans, and readings of other ranks' clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._schedule import Kind
from .recorder import COMPUTE, MESSAGE
from .ring import Raw

__all__ = ["ClockReading", "Span", "span_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    start: int
    """Nanoseconds."""
    end: int
    """Nanoseconds."""
    category: str
    """Such as "compute" or "communication"."""
    name: str
    """What was done."""
    step: int = 0
    """Training step in which it began."""
    track: int = 0
    """Thread, stream, or -1 for messages."""
    tags: dict[str, Any] = field(default_factory=dict)
    """What else is known."""

    @property
    def length(self) -> int:
        """Nanoseconds."""
        return self.end - self.start

    @property
    def is_action(self) -> bool:
        """Whether it is an action of a schedule."""
        return self.category == COMPUTE and {"kind", "stage", "microbatch"} <= self.tags.keys()

    @property
    def is_message(self) -> bool:
        """Whether it is an end of a message."""
        return self.category == MESSAGE and {"direction", "peer", "key"} <= self.tags.keys()


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What a rank learned of another one's clock by some messages to and fro."""

    time: int
    """Nanoseconds by its own clock."""
    parent: int
    """The other rank."""
    offset: int
    """Nanoseconds by which the other clock is ahead."""
    bound: int
    """Nanoseconds by which the offset may be wrong at most."""


def span_of(raw: Raw, origin: int) -> Span:
    """Return a span with times since `origin`, in nanoseconds."""
    (_, category, name, step, track, tags, start), end = raw
    if name is None:
        kind, stage, microbatch = tags
        letter = Kind(kind).name
        name, tags = f"{stage}{letter}{microbatch}", {"kind": letter, "stage": stage, "microbatch": microbatch}
    return Span(start - origin, end - origin, category, name, step, track, dict(tags) if tags else {})
