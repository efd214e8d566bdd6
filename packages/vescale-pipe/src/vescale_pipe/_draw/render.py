"""Pictures of schedules, simulations and measured timelines."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from .._schedule import Schedule
from .._simulate import Costs, Simulation
from .bars import Bar, picture
from .layout import lay_out
from .png import write_png
from .svg import to_svg
from .text import to_text

__all__ = ["render"]


ENDINGS: dict[str, Literal["svg", "png", "text"]] = {".svg": "svg", ".png": "png", ".txt": "text"}


def render(
    what: Schedule | Simulation | Iterable[Bar],
    path: str | PathLike[str] | None = None,
    *,
    format: Literal["svg", "png", "text"] | None = None,
    costs: Costs | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> str:
    """Draw who does what when, with the bubbles in figures.

    Args:
        what: a schedule, which is simulated first; a simulation; or bars, such as measured ones.
        path: file to write; None: none is.
        format: "svg"; "png", which needs matplotlib and a path; "text" for a terminal. None: what the path ends
            with (.svg, .png, .txt), svg without a path.
        costs: what the actions of a schedule cost; None: a forward, an input gradient and a weight gradient of all
            layers of a rank take 1 each.
        title: first line; None: name and size of the schedule.
        unit: unit of times: "s", or "" for plain numbers; None: "s", plain for a schedule without costs.

    Returns:
        The text of the picture; for png, the path.

    Raises:
        ValueError: the format is unknown or needs a path; there are too many bars to see; costs are given with
            something that has times.
        ScheduleError: the schedule cannot be simulated.
        ImportError: the format is png, and matplotlib is not installed.

    Example:
        >>> from vescale_pipe import Schedule, parse_action, render
        >>> rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
        >>> actions = [[parse_action(text) for text in row.split()] for row in rows]
        >>> print(render(Schedule.of("1f1b", [0, 1], 2, actions), format="text"))
        1f1b: 2 ranks, 2 micro-batches
        makespan 9, bubble 33.3% (in the ranks' own span 33.3%), peak 2 activations
        rank 0  F0-F1-.  .  B0----.  B1----
        rank 1  .  F0-B0----F1-B1----.  .
        one column: 1
        <BLANKLINE>
    """
    if isinstance(path, Costs):
        raise ValueError("path: costs were given in its place; give them by name: render(schedule, costs=...).")
    if format is None:
        ending = Path(path).suffix.lower() if path is not None else ".svg"
        if ending not in ENDINGS:
            raise ValueError(f"path: {path} ends in none of {', '.join(ENDINGS)}; give one of these, or a format.")
        format = ENDINGS[ending]
    if format not in ("svg", "png", "text"):
        raise ValueError(f'format: {format!r} given; it must be "svg", "png" or "text".')
    if format == "png" and path is None:
        raise ValueError("path: none given; a PNG is not text, so that it needs a file to go to.")
    shown = picture(what, costs, title, unit)
    if format == "png":
        assert path is not None
        write_png(lay_out(shown), path)
        return fspath(path)
    text = to_text(shown) if format == "text" else to_svg(lay_out(shown))
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
