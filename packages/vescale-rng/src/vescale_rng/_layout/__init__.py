"""Which elements of a whole tensor a rank holds, as boxes: the only view of a layout that the rest of the package has.

Parts are made of a mesh and placements, of slices, flat ranges or boxes, or read off a tensor.
"""

from __future__ import annotations

from .boxes import part_of_boxes, part_of_slices
from .flat import part_of_flat
from .mesh import part_of_mesh
from .part import Box, Part
from .tensor import part_of_tensor

__all__ = ["Box", "Part", "part_of_boxes", "part_of_flat", "part_of_mesh", "part_of_slices", "part_of_tensor"]
