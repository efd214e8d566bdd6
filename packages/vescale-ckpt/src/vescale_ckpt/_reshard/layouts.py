"""What a caller asks for -> a mesh and placements per tensor, and empty tensors of that layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["NewLayout", "NewLayouts", "allocate", "choose"]

NewLayout: TypeAlias = "tuple[DeviceMesh, Sequence[Placement]]"
"""A mesh and one placement per axis of it."""
NewLayouts: TypeAlias = "NewLayout | Mapping[str, NewLayout] | Callable[[str, Tensor], NewLayout | None]"
"""The same for all tensors, by patterns of names, or by a function."""


def choose(tensors: Sequence[tuple[Sequence[str], Tensor]], asked: Any) -> list[NewLayout | None] | None:
    """Return the new layout of each tensor, None for those that stay; or None if `asked` is no layouts but a state.

    Args:
        tensors: (all names, tensor).
        asked: as of `reshard`.

    Raises:
        LayoutError: a pattern fits no tensor, or a function returned something else.
    """
    if _is_pair(asked):
        return [asked] * len(tensors)
    if isinstance(asked, Mapping) and asked and all(map(_is_pair, asked.values())):
        fits = {p: [any(fnmatchcase(name, p) for name in names) for names, _ in tensors] for p in asked}
        idle = [pattern for pattern, found in fits.items() if not any(found)]
        if idle and tensors:
            raise LayoutError(
                f"new_layouts: {idle[0]!r} fits no tensor of the state. Tensors are {[n[0] for n, _ in tensors[:8]]}."
            )
        return [next((asked[p] for p, found in fits.items() if found[n]), None) for n in range(len(tensors))]
    if callable(asked) and not hasattr(asked, "state_dict"):
        pairs = [asked(names[0], tensor) for names, tensor in tensors]
        for (names, _), pair in zip(tensors, pairs, strict=True):
            if pair is not None and not _is_pair(pair):
                raise LayoutError(
                    f"new_layouts: for {names[0]} the function returned {pair!r}. Return a tuple (mesh, placements), "
                    f"or None for a tensor that stays."
                )
        return pairs
    return None


def allocate(name: str, shape: Sequence[int], dtype: torch.dtype, layout: NewLayout) -> DTensor:
    """Return a DTensor of torch without values; on ranks outside of the mesh its local part is empty.

    Raises:
        LayoutError: the placements do not go with the mesh or the tensor, or are not those of torch.
    """
    from torch.distributed.tensor import Placement, Shard, empty

    mesh, placements = layout
    placements = (placements,) if isinstance(placements, Placement) else tuple(placements)
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"new_layouts: {name}: a mesh of {mesh.ndim} axes needs one placement for each, but got {placements}."
        )
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Placement) or not type(placement).__module__.startswith("torch."):
            raise LayoutError(
                f"new_layouts: {name}: {placement!r} is no placement of torch. For tensors of other classes pass a "
                f"state that has them, which is filled in place."
            )
        if placement.is_partial():
            raise LayoutError(
                f"new_layouts: {name}: {placement!r} on axis {axis} asks for a pending sum, to which no tensor can be "
                f"moved. Use Replicate() or Shard(dim)."
            )
        dim = getattr(placement, "dim", 0)
        if hasattr(placement, "dim") and not -len(shape) <= dim < len(shape):
            raise LayoutError(
                f"new_layouts: {name}: {placement!r} on axis {axis} cuts a dim that a tensor of shape {list(shape)} "
                f"does not have."
            )
    normal = [Shard(p.dim % len(shape)) if type(p) is Shard else p for p in placements]
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=normal)


def _is_pair(value: Any) -> bool:
    # Who has a mesh has imported its module; importing it here would cost every user of this package half a second.
    meshes = sys.modules.get("torch.distributed.device_mesh")
    return (
        isinstance(value, tuple) and len(value) == 2 and meshes is not None and isinstance(value[0], meshes.DeviceMesh)
    )
