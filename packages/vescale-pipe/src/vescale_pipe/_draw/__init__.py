"""Pictures of schedules and timelines: SVG, text, and PNG where matplotlib is installed."""

from .bars import Bar
from .render import render

__all__ = ["Bar", "render"]
