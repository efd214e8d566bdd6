"""Spans of one track put on lanes, so that those of each lane lie in or after each other, never across."""

from __future__ import annotations

from collections.abc import Sequence

from .span import Span

__all__ = ["lanes"]


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Return lanes of spans that nest; viewers draw nothing else on a track.

    Args:
        spans: in the order of their starts, of equal starts the longest first.

    Example:
        >>> some = [Span(0, 10, "a", "x"), Span(2, 5, "a", "y"), Span(4, 12, "a", "z")]
        >>> [[span.name for span in lane] for lane in lanes(some)]
        [['x', 'y'], ['z']]
    """
    found: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in spans:
        for lane, ends in zip(found, open_ends, strict=True):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                lane.append(span)
                ends.append(span.end)
                break
        else:
            found.append([span])
            open_ends.append([span.end])
    return found
