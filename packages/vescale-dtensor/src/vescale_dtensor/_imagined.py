"""Meshes of which one process plays all ranks, one after the other: nothing can be sent on them."""

from __future__ import annotations

import types
import weakref
from typing import Any

from ._mesh import MeshInfo


def imagined_mesh(ranks: int, rank: int, device_type: str) -> MeshInfo:
    """A mesh of one axis as `rank` sees it; needs no process group.

    >>> imagined_mesh(4, 1, "cpu")
    mesh(ranks=4)
    """
    info: Any = object.__new__(MeshInfo)
    info.device_mesh = types.SimpleNamespace(mesh_dim_names=("ranks",), device_type=device_type)
    info.device_type, info.sizes, info.ndim, info.size = device_type, (ranks,), 1, ranks
    info.coordinate, info.world = (rank,), None
    info.specs, info._groups, info._members = weakref.WeakValueDictionary(), {}, {}
    return info  # type: ignore[no-any-return]
