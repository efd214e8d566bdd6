"""Checking that all ranks hold the same plain data, by comparing digests: one small collective.

Plain tensors are taken as the same on every rank. That is the user's claim; the commonest way to break
it is to give each rank a batch, or a seed, of its own, and every number would then be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from .._bytes import hash_of
from .._comm.objects import gather_objects
from .._deferred import fingerprint, is_deferred
from .._mesh import MeshInfo


def digest(tensor: Tensor) -> str:
    """Return a text that equals for equal tensors: shape, dtype and a hash of the data."""
    if is_deferred(tensor):
        return fingerprint(tensor)
    described = f"{list(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta or tensor.layout.__repr__() != "torch.strided":
        return described
    return f"{described} {hash_of(tensor)}"


def disagreements(mesh: MeshInfo, mine: Mapping[str, str]) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Compare texts over the mesh, of which every rank must call this.

    Returns:
        For each key on which ranks differ, what the rank at each mesh coordinate has.
    """
    if mesh.size == 1:
        return {}
    axes = tuple(range(mesh.ndim))
    group = mesh.group(axes)
    if dist.get_backend(group) == "fake":  # nobody answers there
        return {}
    said: list[dict[str, str]] = gather_objects(dict(mine), group, mesh.device_type)
    keys = dict.fromkeys(k for one in said for k in one)
    return {
        key: [(c, one.get(key, "nothing")) for c, one in zip(mesh.members(axes), said, strict=True)]
        for key in keys
        if len({one.get(key) for one in said}) > 1
    }
