"""A mesh to rehearse on: the shape of the real one, seen from its first rank, where collectives do nothing.

Programs on meta tensors run on it as they would on the mesh, with the same rules, moves and notes of what is
sent, whether or not the ranks have process groups that could take part.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._mesh import Axes, MeshInfo


class _Done:
    """The work of a collective that does nothing."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Nobody:
    """Stands for a process group: takes every collective and leaves the tensors as they are."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _Done()


class RehearsalMesh(MeshInfo):
    """The mesh of `device_mesh` for meta tensors, from the place that holds the largest shards: all coordinates 0."""

    __slots__ = ("_nobodies",)

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.device_type = device_mesh.device_type
        self.sizes = tuple(device_mesh.mesh.shape)
        self.ndim = len(self.sizes)
        self.size = device_mesh.size()
        self.coordinate = (0,) * self.ndim
        self.world = dist.group.WORLD
        self.specs = weakref.WeakValueDictionary()
        self._groups = {}
        self._members = {}
        self._nobodies: dict[Axes, _Nobody] = {}

    def members(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        found = self._members.get(axes)
        if found is None:
            ranges = [range(n) if a in axes else (0,) for a, n in enumerate(self.sizes)]
            found = self._members[axes] = tuple(itertools.product(*ranges))
        return found

    def group(self, axes: Axes) -> Any:
        found = self._nobodies.get(axes)
        if found is None:
            found = self._nobodies[axes] = _Nobody(self.size_of(axes))
        return found

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A local part without data."""
        return torch.empty(shape, dtype=dtype, device="meta")
