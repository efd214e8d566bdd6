"""Where this rank is on a mesh, and through whom it can read the clocks of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clock_ranks", "coordinates_on"]


def coordinates_on(mesh: DeviceMesh | None) -> dict[str, int]:
    """Return where this rank is on each axis of a mesh, by name."""
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return {}
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    return dict(zip(names, place, strict=True))


def clock_ranks(mesh: DeviceMesh | None, group: ProcessGroup | None) -> tuple[ProcessGroup, Sequence[int]] | None:
    """Return the group to read clocks through, and the ranks in it that do so."""
    import torch
    import torch.distributed as dist

    if mesh is None and group is None:
        return None
    if group is None:
        group = dist.group.WORLD
        assert group is not None  # a mesh makes it
    members = dist.get_process_group_ranks(group)
    wanted = members if mesh is None else sorted(mesh.mesh.flatten().tolist())
    missing = sorted(set(wanted) - set(members))
    if missing or dist.get_rank() not in wanted:
        rank = dist.get_rank()
        raise ValueError(
            f"rank {rank}: mesh has ranks {wanted} and group has {members}; the group must have all ranks of the "
            "mesh, and this rank must be one of them."
        )
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(
            "group: it cannot send tensors of the CPU, by which clocks are read; give "
            'group=torch.distributed.new_group(backend="gloo").'
        ) from error
    return group, [members.index(rank) for rank in wanted]
