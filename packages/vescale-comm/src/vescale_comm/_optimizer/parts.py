"""What of a parameter is on this rank before the optimizer shards it: all of it, or the local part of a DTensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._gradients import local_of
from .._hooks import plugin_layout
from .._shards import Box, Whole, whole_of
from ..errors import CommError

__all__ = ["Part", "differing_groups", "part_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """What is here of a parameter."""

    local: Callable[[], Tensor]
    """Returns the plain tensor where it lies."""
    whole: Whole
    """The whole parameter, and the boxes that are here."""
    groups: tuple[dist.ProcessGroup, ...]
    """Groups over whose ranks the parts differ; none for a plain tensor."""


def part_of(parameter: Tensor, name: str) -> Part:
    """Return what is here of a parameter.

    Raises:
        CommError: a class that nobody knows, or one whose value awaits a reduction.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(parameter, distributed.DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        box = Box(tuple(offset), tuple(shape))
        groups = differing_groups(parameter, name)
        return Part(lambda: local_of(parameter), Whole(tuple(parameter.shape), (box,)), groups)
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return Part(lambda: parameter, whole_of(parameter.shape), ())
    layout = plugin_layout(parameter)
    if layout is None:
        return Part(lambda: parameter, whole_of(parameter.shape), ())
    if layout.partial:
        raise CommError(f"{name} still awaits a reduction over ranks; redistribute it before it is optimized.")
    boxes = tuple(Box(tuple(box.offset), tuple(box.shape)) for box in layout.boxes)
    whole = Whole(tuple(layout.global_shape), boxes)
    return Part(lambda: local_of(parameter), whole, differing_groups(parameter, name))


def differing_groups(tensor: Tensor, name: str) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over whose ranks the local parts of a tensor are different elements.

    Args:
        tensor: of any class; a sharded one has a `device_mesh` and `placements`, as torch's DTensor.
        name: for messages.

    Raises:
        CommError: the value awaits a reduction, so no part of it is what it will be.
    """
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None:
        return ()
    _refuse_partial(placements, name)
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _refuse_partial(placements: Sequence[Any], name: str) -> None:
    if any(placement.is_partial() for placement in placements):
        raise CommError(f"{name} has the placements {tuple(placements)}: redistribute what is partial first.")
