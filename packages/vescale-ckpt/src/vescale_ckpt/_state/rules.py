"""Meshes and placements of live tensors -> `Rule`.

Placements are told apart by type and attributes, never by importing them: torch may be built without distributed, and
interleaved and ragged placements belong to packages that may not be installed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from .._geometry import Mesh, Rule
from ..errors import LayoutError

__all__ = ["placement_text", "replicated", "rule_of"]


class _Known:
    """What has been worked out for a `DeviceMesh`: one object per layout makes comparing layouts cheap."""

    def __init__(self, mesh: Any, ranks: Sequence[int], where: str) -> None:
        number = {rank: writer for writer, rank in enumerate(ranks)}
        members = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        outside = [rank for rank in members if rank not in number]
        if outside:
            raise LayoutError(
                f"state: {where} lies on a mesh with the ranks {outside[:8]}, which are not in the group of "
                f"{len(ranks)} ranks that saves or loads. Pass a process_group that has all of them."
            )
        self.mesh = weakref.ref(mesh)
        self.ranks = ranks
        self.shape = tuple(int(size) for size in mesh.shape)
        self.members = tuple(number[rank] for rank in members)
        self.rules: dict[tuple[tuple[str, ...], tuple[int, ...]], Rule] = {}

    def rule(self, placements: tuple[str, ...], order: tuple[int, ...]) -> Rule:
        """Return the rule whose mesh axes stand in the order in which they cut."""
        found = self.rules.get((placements, order))
        if found is None:
            shape = tuple(self.shape[axis] for axis in order)
            mesh = Mesh(shape, self._permuted(order))
            found = self.rules[placements, order] = Rule(mesh, tuple(placements[axis] for axis in order))
        return found

    def _permuted(self, order: tuple[int, ...]) -> tuple[int, ...]:
        strides = [1] * len(self.shape)
        for axis in range(len(self.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * self.shape[axis + 1]
        places = [0]
        for axis in order:
            places = [place + strides[axis] * index for place in places for index in range(self.shape[axis])]
        return tuple(self.members[place] for place in places)


_known: dict[int, _Known] = {}


def rule_of(
    mesh: Any, placements: Sequence[Any], ndim: int, ranks: Sequence[int], where: str, spec: Any = None
) -> Rule:
    """Return the rule of a tensor on a `DeviceMesh`.

    Args:
        mesh: the `DeviceMesh`; this rank need not be in it.
        placements: one per mesh axis.
        ndim: number of dims of the whole tensor.
        ranks: global rank of each writer; pass the same object for all tensors, which saves time.
        where: name of the tensor, for messages.
        spec: torch's spec of a DTensor; it tells the order in which the axes cut, where that is not left to right.

    Raises:
        LayoutError: a pending reduction, a placement that is not known, or a mesh with ranks outside of `ranks`.
    """
    known = _known.get(id(mesh))
    if known is None or known.mesh() is not mesh or (known.ranks is not ranks and known.ranks != ranks):
        if known is None or known.mesh() is not mesh:
            weakref.finalize(mesh, _known.pop, id(mesh), None)
        known = _known[id(mesh)] = _Known(mesh, ranks, where)
    known.ranks = ranks  # the next comparison is one of identities
    if len(placements) != len(known.shape):
        raise LayoutError(f"state: {where} has {len(placements)} placements on a mesh of {len(known.shape)} axes.")
    texts = tuple(
        placement_text(placement, ndim, size, where) for placement, size in zip(placements, known.shape, strict=True)
    )
    return known.rule(texts, _order(spec, len(texts)))


@functools.lru_cache(maxsize=8)
def replicated(world: int) -> Rule:
    """Return the rule of a plain tensor, which all writers hold."""
    return Rule(Mesh((world,), range(world)), ("R",))


def placement_text(placement: Any, ndim: int, size: int, where: str) -> str:
    """Return a placement as a manifest writes it.

    Args:
        placement: of torch or of a package like it.
        ndim: number of dims of the tensor.
        size: ranks on the mesh axis: nothing is pending among one.
        where: name of the tensor, for messages.

    Raises:
        LayoutError: a pending reduction, or a placement that is not known.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> placement_text(Shard(-1), 2, 4, "w")
        'S(1)'
    """
    if hasattr(placement, "local_units"):
        dims = tuple(placement.dims)
        if dims != tuple(range(len(dims))) or not dims:
            raise LayoutError(f"state: {where}: a ragged shard flattens the dims 0, 1, ...; this one has {dims}.")
        units = ",".join(str(int(unit)) for unit in placement.local_units)
        return f"RS({len(dims)},{units})"
    if hasattr(placement, "interleave"):
        return f"IS({_dim(placement, ndim, where)},{int(placement.interleave)})"
    if _asks(placement, "is_partial"):
        if size == 1:
            return "R"
        raise LayoutError(
            f"state: {where} has the placement {placement!r}: its value still awaits a reduction over {size} ranks. "
            f"Redistribute it to Replicate() or Shard(dim) before you save it or load into it."
        )
    if _asks(placement, "is_replicate"):
        return "R"
    types = sys.modules.get("torch.distributed.tensor.placement_types")
    strided = getattr(types, "_StridedShard", None)
    if strided is not None and type(placement) is strided:
        return f"SS({_dim(placement, ndim, where)},{int(placement.split_factor)})"
    # Only the class itself: a subclass may cut in another way.
    if types is not None and type(placement) is types.Shard:
        return f"S({_dim(placement, ndim, where)})"
    raise LayoutError(
        f"state: {where} has the placement {placement!r} of class {type(placement).__module__}."
        f"{type(placement).__qualname__}, which is not known here. Known are Replicate, Shard, _StridedShard, "
        f"interleaved shards (dim, interleave) and ragged ones (dims, local_units)."
    )


def _asks(placement: Any, question: str) -> bool:
    method = getattr(placement, question, None)
    return callable(method) and bool(method())


def _dim(placement: Any, ndim: int, where: str) -> int:
    dim = int(placement.dim)
    if not -ndim <= dim < ndim:
        raise LayoutError(f"state: {where}: {placement!r} cuts a dim that a tensor of {ndim} dims does not have.")
    return dim % ndim


def _order(spec: Any, axes: int) -> tuple[int, ...]:
    """Return the mesh axes in the order in which they cut.

    torch writes an order other than left to right either in `shard_order`, or as strided shards, which say it all.
    """
    order: list[int] = []
    if spec is not None and not getattr(spec, "use_strided_shard_as_shard_order", False):
        for entry in getattr(spec, "shard_order", None) or ():
            order += entry.mesh_dims
    # The order matters only among the axes that cut one dim: without need the axes stay as they are.
    if all(a < b for entry in (getattr(spec, "shard_order", None) or ()) for a, b in _pairs(entry.mesh_dims)):
        return tuple(range(axes))
    return (*order, *(axis for axis in range(axes) if axis not in order))


def _pairs(dims: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(dims))
