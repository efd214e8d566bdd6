"""Device meshes made once per process: on a pool, each new one would add groups that nobody removes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def cached_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the CPU mesh of this shape over all ranks, made at the first call.

    All ranks must call it. The first call communicates, later ones do not.

    Args:
        shape: Sizes of the mesh axes; their product is the world size.
        names: Names of the axes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    # The group is part of the key, and kept alive by it: a mesh dies with the group that it was made in.
    key = (shape, names, dist.group.WORLD)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]
