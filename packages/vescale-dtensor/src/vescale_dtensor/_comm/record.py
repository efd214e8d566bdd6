"""The taps through which others see what this package sends: `explain()`, and a timeline plugin.

Both are off unless somebody looks: a collective pays one truth test for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _hooks
from .._mesh import Axes, MeshInfo

if TYPE_CHECKING:
    from ..hookspecs import Timeline


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as issued by this rank."""

    name: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""
    num_bytes: int
    """Bytes of the local input."""
    mesh: MeshInfo
    """Mesh that the ranks belong to."""
    axes: Axes
    """Mesh axes that it spans."""


listeners: list[Callable[[Collective], None]] = []


def note(name: str, num_bytes: int, mesh: MeshInfo, axes: Axes) -> None:
    """Tell the listeners of one collective."""
    if listeners:
        event = Collective(name, num_bytes, mesh, axes)
        for listener in listeners:
            listener(event)


class _TimelineSlot:
    """The timeline that plugins provide, asked for once, when the first step is run."""

    def __init__(self) -> None:
        self.asked = False
        self.timeline: Timeline | None = None

    def ask(self) -> Timeline | None:
        self.asked, self.timeline = True, _hooks.timeline()
        return self.timeline


slot = _TimelineSlot()


def begin(name: str) -> object | None:
    """Open a span for a step if a timeline is recording; the token goes to `end`."""
    timeline = slot.timeline if slot.asked else slot.ask()
    return None if timeline is None else timeline.begin("communication", name)


def end(token: object | None) -> None:
    """Close the span of a token."""
    if token is not None and slot.timeline is not None:
        slot.timeline.end(token)
