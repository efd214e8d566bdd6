"""Text for people: aligned tables, sizes, times, and JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["count", "number", "plain", "size", "table", "when", "write", "write_json"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def write(text: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write(f"{text}\n")


def write_json(value: Any) -> None:
    """Write a value as JSON to standard output; dataclasses become objects, numbers that JSON lacks become strings."""
    write(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Return a value as what JSON can hold.

    Example:
        >>> plain({"a": (1, float("nan"))})
        {'a': [1, 'nan']}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit of which there is one.

    Example:
        >>> size(0), size(1023), size(1536), size(5 << 30)
        ('0 B', '1023 B', '1.5 KiB', '5.0 GiB')
    """
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def when(seconds: float | None) -> str:
    """Return a time as local date and time; "?" where it is not known, or is none that a calendar has."""
    if seconds is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def number(value: float) -> str:
    """Return a measured number in few digits.

    Example:
        >>> number(0.0), number(1234567.0), number(0.00012345)
        ('0', '1.235e+06', '0.0001234')
    """
    return f"{value:.4g}"


def count(number_of: int, what: str) -> str:
    """Return a count with its noun.

    Example:
        >>> count(1, "step"), count(2, "step")
        ('1 step', '2 steps')
    """
    return f"{number_of} {what}" if number_of == 1 else f"{number_of} {what}s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return rows as lines with aligned columns.

    Args:
        head: names of the columns.
        rows: cells.
        right: names of the columns that are aligned on the right, as words.

    Example:
        >>> print(table(["step", "size"], [["1", "5 B"], ["200", "17 B"]], right="step size"))
        step  size
           1   5 B
         200  17 B
    """
    names = set(right.split())
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if name in names else cell.ljust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def printable(text: str) -> str:
    r"""Return text from a file so that it cannot move the cursor or forge lines.

    Example:
        >>> printable("a\x1b[2Jb\n")
        'a\\x1b[2Jb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
