"""Pictures as SVG, written by hand: no library is needed, and any browser shows them."""

from __future__ import annotations

from .layout import Canvas

__all__ = ["to_svg"]

MOST_TIPS = 5_000


def to_svg(canvas: Canvas) -> str:
    """Return the text of an SVG file."""
    width, height = _short(canvas.width), _short(canvas.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    tips = len(canvas.rectangles) <= MOST_TIPS
    for box in canvas.rectangles:
        edge = f' stroke="{box.edge}" stroke-width="0.7"' if box.edge else ""
        start = (
            f'<rect x="{_short(box.x)}" y="{_short(box.y)}" width="{_short(box.width)}" height="{_short(box.height)}" '
            f'fill="{box.fill}"{edge}'
        )
        lines.append(f"{start}><title>{_escaped(box.tip)}</title></rect>" if tips and box.tip else f"{start}/>")
    lines += [
        f'<line x1="{_short(one.x)}" y1="{_short(one.y)}" x2="{_short(one.to_x)}" y2="{_short(one.to_y)}" '
        f'stroke="{one.colour}"/>'
        for one in canvas.lines
    ]
    for text in canvas.texts:
        anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
        weight = ' font-weight="bold"' if text.bold else ""
        lines.append(
            f'<text x="{_short(text.x)}" y="{_short(text.y)}" font-size="{_short(text.size)}" fill="{text.colour}"'
            f"{anchor}{weight}>{_escaped(text.text)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(text: str) -> str:
    """Return text as XML takes it: control characters are not allowed in it at all."""
    text = "".join(sign if sign >= " " else " " for sign in text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
