"""Pictures for a terminal: a line per rank, a column per unit of time."""

from __future__ import annotations

from .bars import Picture, number

__all__ = ["to_text"]

MOST_COLUMNS = 400


def to_text(picture: Picture) -> str:
    """Return a picture as lines of text.

    A column stands for the length of the shortest bar, or more if the picture were too wide; a bar starts with what it
    is, goes on with dashes, and dots are idle time. Of a joined pair, each has a line.
    """
    lengths = [bar.end - bar.start for bar in picture.bars if bar.end > bar.start]
    column = max(min(lengths, default=0.0), picture.length / MOST_COLUMNS)
    count = round(picture.length / column) if column > 0 else 0
    many = any(bar.shade for bar in picture.bars)
    names = [bar.full if many else f"{bar.kind}{bar.label}" for bar in picture.bars]
    width = max(map(len, names), default=1) + 1
    head = max(map(len, picture.rows), default=0) + 2
    rows = [["."] * count for _ in picture.rows]
    below = [[" "] * count for _ in picture.rows]
    for bar, name in zip(picture.bars, names, strict=True):
        first = round(bar.start / column) if column > 0 else 0
        last = max(first + 1, round(bar.end / column) if column > 0 else 0)
        cells = (below if bar.part == "lower" else rows)[bar.rank]
        for place in range(first, min(last, count)):
            cells[place] = name if place == first else "-"
    lines = [line for line in (picture.title, picture.figures) if line]
    for label, upper, lower in zip(picture.rows, rows, below, strict=True):
        lines.append(label.ljust(head) + "".join(_cell(cell, width) for cell in upper).rstrip())
        if any(cell != " " for cell in lower):
            lines.append(" " * head + "".join(_cell(cell, width) for cell in lower).rstrip())
    lines.append(f"one column: {number(column, picture.unit)}")
    return "\n".join(lines) + "\n"


def _cell(text: str, width: int) -> str:
    return "-" * width if text == "-" else text.ljust(width, " " if text in (" ", ".") else "-")
