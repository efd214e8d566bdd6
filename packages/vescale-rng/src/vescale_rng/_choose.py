"""The ways in which a caller may say which elements of a whole tensor it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._layout import Part, part_of_flat, part_of_mesh, part_of_slices
from ._layout.part import check_size, integers
from .errors import LayoutError

__all__ = ["PartLike", "check_local", "choose_part"]

PartLike = Part | Sequence[slice | Sequence[slice]] | range | None
"""A part, or what stands for one: a slice (or a list of slices) per dim, or a range over the flattened tensor."""


def check_local(local: Any) -> None:
    """Refuse what is no dense tensor.

    Raises:
        TypeError: naming what was given.
    """
    if not isinstance(local, Tensor):
        raise TypeError(f"local: expected a torch.Tensor, got {local!r} ({type(local).__name__})")
    if local.layout is not torch.strided:
        raise TypeError(f"local: expected a dense tensor, got one of layout {local.layout}; use local.to_dense()")


def choose_part(
    shape: Sequence[int],
    part: PartLike,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
) -> Part:
    """Return the part that a caller means.

    Args:
        shape: of the whole tensor.
        part: a `Part`, slices per dim, a range over the flattened tensor, or None.
        mesh: a `DeviceMesh`, with `placements`.
        placements: one per mesh axis.
        stride: strides of the whole tensor.

    Raises:
        LayoutError: if more than one way is used, or a part does not fit the shape.

    >>> choose_part((4, 6), (slice(0, 2), slice(2, 4))).local_shape
    (2, 2)
    """
    alone = mesh is None and placements is None and stride is None
    if alone and isinstance(part, Part) and part.global_shape == shape:  # the way of those who draw often
        return part
    shape = integers("shape", shape)
    check_size("shape", shape)
    if (mesh is None) != (placements is None):
        missing = "placements" if placements is None else "mesh"
        raise LayoutError(
            f"{missing}: not given; give mesh and placements together, or `part`, or neither for the whole"
        )
    if mesh is not None:
        if part is not None:
            raise LayoutError("part: given beside mesh and placements; give one of the two")
        return part_of_mesh(shape, mesh, placements or (), stride)
    if part is None:
        return Part.whole(shape, stride)
    if isinstance(part, Part):
        if part.global_shape != shape or (stride is not None and tuple(stride) != part.global_stride):
            raise LayoutError(
                f"part: made for a tensor of shape {part.global_shape} and strides {part.global_stride}, but shape "
                f"{shape} and stride {stride} were asked for"
            )
        return part
    if isinstance(part, range):
        if part.step != 1:
            raise LayoutError(f"part: {part} has step {part.step}; a range over the flattened tensor has step 1")
        return part_of_flat(shape, part.start, part.stop, stride)
    return part_of_slices(shape, part, stride)
