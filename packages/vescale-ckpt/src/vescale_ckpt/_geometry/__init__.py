"""Boxes, layouts, and who writes what: integers only, no torch, nothing is communicated."""

from .assign import Assignment, Geometry
from .box import Box, Piece, normal
from .layout import Explicit, Layout, Rule
from .mesh import Mesh
from .placements import Placement, parse_placement

__all__ = [
    "Assignment",
    "Box",
    "Explicit",
    "Geometry",
    "Layout",
    "Mesh",
    "Piece",
    "Placement",
    "Rule",
    "normal",
    "parse_placement",
]
