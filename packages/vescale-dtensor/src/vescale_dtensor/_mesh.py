"""What the package needs to know of a `DeviceMesh`, computed once per mesh.

`mesh_info(mesh)` returns the same object for equal meshes of one rank (ranks may be threads), so
that specs can be compared by identity. Process groups over several mesh axes are made on first
use, by their members alone: a mesh that covers only a part of the world never waits for the rest.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._hooks import plugin_fingerprint
from ._tap import unrecorded

if TYPE_CHECKING:
    from ._spec import Spec

Axes = tuple[int, ...]


class MeshInfo:
    """A device mesh as seen by this rank."""

    __slots__ = (
        "__weakref__",
        "_groups",
        "_members",
        "coordinate",
        "device_mesh",
        "device_type",
        "ndim",
        "size",
        "sizes",
        "specs",
        "world",
    )

    def __init__(self, device_mesh: DeviceMesh) -> None:
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not part of the mesh {device_mesh}; "
                "only ranks of a mesh can hold its tensors: guard the call, or build the mesh over these ranks"
            )
        self.device_mesh = device_mesh
        self.device_type: str = device_mesh.device_type
        with unrecorded():
            self.sizes: tuple[int, ...] = tuple(device_mesh.mesh.shape)
        self.ndim = len(self.sizes)
        self.size = math.prod(self.sizes)
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.world = dist.group.WORLD
        self.specs: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        self._members: dict[Axes, tuple[tuple[int, ...], ...]] = {}

    def __repr__(self) -> str:
        names = self.device_mesh.mesh_dim_names or tuple(map(str, range(self.ndim)))
        return "mesh(" + ", ".join(f"{n}={s}" for n, s in zip(names, self.sizes, strict=True)) + ")"

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshInfo:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.device_type, self.device_mesh.mesh.tolist(), self.device_mesh.mesh_dim_names)

    def axis_name(self, axis: int) -> str:
        """Name of a mesh axis, or its number where the mesh has no names."""
        names = self.device_mesh.mesh_dim_names
        return names[axis] if names else str(axis)

    def size_of(self, axes: Axes) -> int:
        """Number of ranks that differ from this one in `axes` only, this one included."""
        return math.prod(self.sizes[a] for a in axes)

    def members(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Mesh coordinates of the ranks that share all of this rank's other coordinates, in group order."""
        found = self._members.get(axes)
        if found is None:
            at = self.ranks_over(axes)
            found = self._members[axes] = tuple(at[r] for r in dist.get_process_group_ranks(self.group(axes)))
        return found

    def ranks_over(self, axes: Axes) -> dict[int, tuple[int, ...]]:
        """Coordinates by rank; a mesh may list its ranks in any order, a group sorts them."""
        ranges = [range(self.sizes[a]) if a in axes else (self.coordinate[a],) for a in range(self.ndim)]
        with unrecorded():  # a mesh is a tensor, but what is read of it is no part of a call
            grid = self.device_mesh.mesh
            return {int(grid[c]): c for c in itertools.product(*ranges)}

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Process group of `members(axes)`; rank i of the group is at the i-th coordinate."""
        found = self._groups.get(axes)
        if found is None:
            with unrecorded():
                found = self._groups[axes] = self._make_group(axes)
                _compare_plugins(self, found, axes)
        return found

    def _make_group(self, axes: Axes) -> dist.ProcessGroup:
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        ranks = sorted(self.ranks_over(axes))
        if len(ranks) == dist.get_world_size() and self.world is not None:
            return self.world
        name = "x".join(self.axis_name(a) for a in axes)
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=f"vescale_{name}")  # type: ignore[no-any-return]


def _compare_plugins(mesh: MeshInfo, group: dist.ProcessGroup, axes: Axes) -> None:
    """Raise if the ranks of a group have different plugins, before they can disagree on what to send."""
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return
    mine = int(plugin_fingerprint()[:12], 16)
    sent = torch.tensor([mine], dtype=torch.int64, device=mesh.device_type)
    said = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(said, sent, group=group)
    differ = [c for c, s in zip(mesh.members(axes), said, strict=True) if int(s) != mine]
    if differ:
        raise RuntimeError(
            f"the rank at {mesh.coordinate} of {mesh!r} has other vescale plugins than those at {differ}; "
            "compare `python -m vescale_dtensor plugins` on both, and install and switch off the same on every rank"
        )


_known: dict[DeviceMesh, MeshInfo] = {}


def any_mesh() -> bool:
    """Whether this process has used a mesh, without which there are no DTensors."""
    return bool(_known)


def mesh_info(device_mesh: DeviceMesh) -> MeshInfo:
    """Return the one `MeshInfo` of a mesh.

    Raises:
        TypeError: `device_mesh` is not a `DeviceMesh`.
        ValueError: this rank is not part of the mesh.
    """
    info: MeshInfo | None = getattr(device_mesh, "_vescale_info", None)
    world = dist.group.WORLD
    if info is not None and info.world is world:
        return info
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a torch DeviceMesh, got {type(device_mesh).__name__}; "
            'make one with init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))'
        )
    info = _known.get(device_mesh)
    if info is None or info.world is not world:  # the process groups were torn down and made anew
        from ._register import ask_plugins

        ask_plugins()  # no DTensor exists without a mesh, so plugins' rules are there before the first operator
        info = _known[device_mesh] = MeshInfo(device_mesh)
    device_mesh._vescale_info = info  # type: ignore[attr-defined]
    return info


def _restore(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> MeshInfo:
    """Find the mesh of an unpickled tensor among the meshes that this process knows, or make it."""
    wanted = torch.tensor(ranks, dtype=torch.int)
    for mesh, info in _known.items():
        if (
            info.world is dist.group.WORLD
            and mesh.mesh_dim_names == names
            and torch.equal(mesh.mesh.to(torch.int), wanted)
        ):
            return info
    if not dist.is_initialized():
        raise RuntimeError(
            f"a DTensor on a mesh of ranks {ranks} needs its process group: call torch.distributed.init_process_group "
            "and make the mesh before unpickling, or save full_tensor() instead"
        )
    return mesh_info(DeviceMesh(device_type, wanted, mesh_dim_names=names))
