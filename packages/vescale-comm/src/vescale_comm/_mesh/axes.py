"""Mesh axes as a caller names them, and the groups of ranks along them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CommError

__all__ = ["axis_name", "axis_numbers", "group_over", "ranks_over", "wide_axes"]


def axis_name(mesh: DeviceMesh, axis: int) -> str:
    """Return the name of a mesh axis, or its number where the mesh has no names."""
    return mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)


def axis_numbers(mesh: DeviceMesh, axes: int | str | Sequence[int | str]) -> tuple[int, ...]:
    """Return the indices of mesh axes, in the order of the mesh.

    Args:
        mesh: the mesh; this rank must be in it.
        axes: names or indices, or one.

    Raises:
        ValueError: there is no such axis, or one is given twice, or this rank is not in the mesh.
    """
    known = ", ".join(f"{number} ({axis_name(mesh, number)!r})" for number in range(mesh.ndim))
    found = []
    for axis in [axes] if isinstance(axes, int | str) else axes:
        number = axis
        if isinstance(axis, str):
            names = mesh.mesh_dim_names or ()
            number = names.index(axis) if axis in names else -1
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < mesh.ndim:
            raise ValueError(f"axes: the mesh has no axis {axis!r}; it has {known}.")
        if number in found:
            raise ValueError(f"axes: {axis!r} is there twice; each axis is reduced over once.")
        found.append(number)
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of it; only ranks of a mesh reduce over its axes.")
    return tuple(sorted(found))


def wide_axes(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    """Return those of some axes along which there is more than one rank."""
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


def ranks_over(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one along some axes only, itself included, in row-major order."""
    here = mesh.get_coordinate()
    if here is None:
        raise CommError(f"rank {dist.get_rank()} is not part of the mesh.")
    ranges = [range(mesh.size(axis)) if axis in axes else (here[axis],) for axis in range(mesh.ndim)]
    return tuple(int(mesh.mesh[at]) for at in itertools.product(*ranges))


def group_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group of `ranks_over`; a new one for several axes, unless those are all ranks there are."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    ranks = sorted(ranks_over(mesh, axes))
    world: Any = dist.group.WORLD
    if world is not None and ranks == dist.get_process_group_ranks(world):
        return world  # type: ignore[no-any-return]
    name = "x".join(axis_name(mesh, axis) for axis in axes)
    return dist.new_group(ranks, use_local_synchronization=True, group_desc=f"vescale_{name}")  # type: ignore[no-any-return]
