"""Where everything of a picture is: rectangles, lines and texts in pixels, for whatever draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .bars import KINDS, Bar, Picture, number

__all__ = ["Canvas", "Line", "Rectangle", "Text", "lay_out"]

COLOURS = {
    "F": (59, 111, 182),
    "B": (47, 143, 91),
    "I": (232, 150, 40),
    "W": (136, 86, 167),
    "message": (120, 120, 120),
    "other": (170, 120, 90),
    "shade": (80, 80, 80),
}
INK, GREY, IDLE = "#222222", "#777777", "#eeeeee"
ROW, GAP, TOP, EDGE = 26.0, 4.0, 62.0, 14.0
NARROWEST, WIDEST = 420.0, 2600.0
EM, MEAN = 0.64, 0.56  # widths of a digit and of a usual letter in the widest of the usual fonts, in font sizes
SMALLEST = 6.5
MOST_BARS = 50_000


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle; (x, y) is its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    """Colour of its edge; empty: none."""
    tip: str = ""
    """What a viewer tells of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A thin line."""

    x: float
    y: float
    to_x: float
    to_y: float
    colour: str = GREY


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; (x, y) is on its base line."""

    x: float
    y: float
    text: str
    size: float
    colour: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(slots=True)
class Canvas:
    """A picture in pixels."""

    width: float
    height: float = 0.0
    rectangles: list[Rectangle] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def lay_out(picture: Picture) -> Canvas:
    """Return where everything of a picture is.

    Raises:
        ValueError: there are so many bars that nobody could see them.
    """
    if len(picture.bars) > MOST_BARS:
        raise ValueError(
            f"{len(picture.bars)} bars to draw; at most {MOST_BARS} can be seen. Draw fewer micro-batches."
        )
    left = EDGE + 8 + MEAN * 12 * max(map(len, picture.rows), default=0)
    # The plot is as wide at least as what is written over it.
    head = MEAN * max(16 * 1.1 * len(picture.title), 12 * len(picture.figures)) + EDGE
    scale = _scale(picture, max(NARROWEST, head) - left)
    plot = picture.length * scale
    canvas = Canvas(math.ceil(max(left + plot, head, NARROWEST) + 1.5 * EDGE))
    canvas.texts.append(Text(EDGE, 24, picture.title, 16, bold=True))
    canvas.texts.append(Text(EDGE, 44, picture.figures, 12, GREY if picture.title else INK))
    y = TOP
    for rank, name in enumerate(picture.rows):
        top = y + rank * (ROW + GAP)
        canvas.texts.append(Text(left - 8, top + ROW / 2 + 4, name, 12, anchor="end"))
        canvas.rectangles.append(Rectangle(left, top, plot, ROW, IDLE))
    shades = 1 + max((bar.shade for bar in picture.bars), default=0)
    for bar in picture.bars:
        _place(canvas, bar, picture, left, scale, shades)
    y += len(picture.rows) * (ROW + GAP)
    _axis(canvas, picture, left, y, scale)
    y = _legend(canvas, picture, y + 52, shades)
    canvas.height = math.ceil(y + EDGE)
    return canvas


def _scale(picture: Picture, narrowest: float) -> float:
    """Return pixels per second by which labels fit into most bars, and the plot is so many pixels wide."""
    if picture.length <= 0:
        return 0.0
    needs = sorted((EM * 9 * len(bar.label) + 5) / (bar.end - bar.start) for bar in picture.bars if bar.end > bar.start)
    wanted = needs[int(0.98 * (len(needs) - 1))] if needs else 0.0
    return min(max(wanted, narrowest / picture.length), WIDEST / picture.length)


def _place(canvas: Canvas, bar: Bar, picture: Picture, left: float, scale: float, shades: int) -> None:
    """Put a bar and its label on its row."""
    top, height = TOP + bar.rank * (ROW + GAP), ROW
    if bar.part != "whole":
        height = ROW / 2
        top += height * (bar.part == "lower")
    x, width = left + bar.start * scale, (bar.end - bar.start) * scale
    red, green, blue = _shade(bar.kind, bar.shade, shades)
    times = f"{number(bar.start, picture.unit)} to {number(bar.end, picture.unit)}"
    fill = f"#{red:02x}{green:02x}{blue:02x}"
    canvas.rectangles.append(Rectangle(x, top, width, height, fill, "#ffffff", f"{bar.full}: {times}"))
    size = min(11.0, height - 3, (width - 2) / (EM * max(1, len(bar.label))))
    if bar.label and size >= SMALLEST:
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 150
        colour = "#ffffff" if dark else INK
        canvas.texts.append(Text(x + width / 2, top + height / 2 + 0.36 * size, bar.label, size, colour, "middle"))


def _shade(kind: str, shade: int, shades: int) -> tuple[int, int, int]:
    """Return the colour of a kind, the lighter the higher the shade."""
    light = 0.6 * shade / max(1, shades - 1)
    red, green, blue = (round(part + (255 - part) * light) for part in COLOURS.get(kind, COLOURS["other"]))
    return red, green, blue


def _axis(canvas: Canvas, picture: Picture, left: float, y: float, scale: float) -> None:
    """Draw the time axis below the rows."""
    plot = picture.length * scale
    canvas.lines.append(Line(left, y, left + plot, y))
    step = _step(picture.length, max(1, int(plot / 70)))
    tick = 0
    while step > 0 and tick * step <= picture.length * (1 + 1e-9):
        x = left + tick * step * scale
        canvas.lines.append(Line(x, y, x, y + 4))
        canvas.texts.append(Text(x, y + 17, number(tick * step, picture.unit), 11, GREY, "middle"))
        tick += 1
    caption = "time" if picture.unit else "time, where a forward of the layers of a rank takes 1"
    canvas.texts.append(Text(left, y + 34, caption, 11, GREY))


def _step(length: float, most: int) -> float:
    """Return a distance of ticks, 1, 2 or 5 times a power of ten, of which at most `most` fit."""
    if length <= 0:
        return 0.0
    power = 10 ** math.floor(math.log10(length / most))
    return next(float(power * factor) for factor in (1, 2, 5, 10, 20) if power * factor * most >= length)


def _legend(canvas: Canvas, picture: Picture, y: float, shades: int) -> float:
    """Draw what the colours mean; returns how far down it goes."""
    kinds = {bar.kind if bar.kind in KINDS else "other" for bar in picture.bars}
    entries = [(_shade(kind, 0, 1), name) for kind, name in KINDS.items() if kind in kinds]
    if shades > 1:
        entries += [(_shade("shade", shade, shades), f"chunk {shade}") for shade in range(shades)]
    x = EDGE
    for (red, green, blue), name in entries:
        width = 20 + MEAN * 12 * len(name) + 16
        if x > EDGE and x + width > canvas.width:
            x, y = EDGE, y + 20
        canvas.rectangles.append(Rectangle(x, y, 14, 14, f"#{red:02x}{green:02x}{blue:02x}"))
        canvas.texts.append(Text(x + 20, y + 11, name, 12))
        x += width
    return y + 14
