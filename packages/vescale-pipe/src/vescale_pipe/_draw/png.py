"""Pictures as PNG, through matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from os import PathLike

from .layout import Canvas

__all__ = ["write_png"]

DOTS = 100
"""Pixels of the layout per inch of matplotlib."""


def write_png(canvas: Canvas, path: str | PathLike[str], *, pixels: float = 2.0) -> None:
    """Write a PNG file.

    Args:
        canvas: what to draw.
        path: where to.
        pixels: of the file for each of the layout.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError('PNG needs matplotlib: pip install "vescale-pipe[plot]"; SVG needs nothing.') from error
    figure = Figure(figsize=(canvas.width / DOTS, canvas.height / DOTS), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, canvas.width)
    axes.set_ylim(canvas.height, 0)
    axes.set_axis_off()
    points = 72 / DOTS
    for box in canvas.rectangles:
        edge = box.edge or "none"
        axes.add_patch(
            Rectangle((box.x, box.y), box.width, box.height, facecolor=box.fill, edgecolor=edge, linewidth=0.7 * points)
        )
    for line in canvas.lines:
        axes.plot([line.x, line.to_x], [line.y, line.to_y], color=line.colour, linewidth=points)
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for text in canvas.texts:
        axes.text(
            text.x,
            text.y,
            text.text.replace("$", r"\$"),
            fontsize=text.size * points,
            color=text.colour,
            horizontalalignment=anchors[text.anchor],
            verticalalignment="baseline",
            fontweight="bold" if text.bold else "normal",
        )
    figure.savefig(path, dpi=DOTS * pixels, format="png")
