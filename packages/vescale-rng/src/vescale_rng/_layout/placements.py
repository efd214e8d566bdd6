"""One placement of a mesh axis as a `Cut`: how the axis cuts the local tensor that the axes before it have left.

Placements are told apart by type and by attributes, never by importing them: torch may be built without distributed,
and the interleaved and ragged placements belong to packages that may not be installed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ..errors import LayoutError
from .part import integers


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh axis that cuts the tensor; axes that replicate it have none."""

    axis: int
    """Mesh axis."""
    dim: int
    """Tensor dim that is cut; for a ragged cut the number of leading dims that are flattened."""
    blocks: int = 1
    """Number of blocks of the dim, of each of which a rank has a chunk."""
    equal: bool = False
    """Whether the blocks must be of equal size (interleaved) or are chunks themselves (torch's strided shard)."""
    units: tuple[int, ...] | None = None
    """Sizes of the pieces of a ragged cut, in proportion."""


def cut_of(placement: Any, axis: int, ndim: int) -> Cut | None:
    """Return how `placement`, the one of mesh `axis`, cuts a tensor of `ndim` dims; None if it replicates it.

    Raises:
        LayoutError: for a partial value, a dim that does not exist, or a placement that is not known.
    """
    where = f"placements[{axis}] = {placement!r}"
    if hasattr(placement, "local_units"):
        dims = [_dim(dim, ndim, where) for dim in placement.dims]
        if dims != list(range(len(dims))) or not dims:
            raise LayoutError(f"{where}: a ragged shard flattens the leading dims 0, 1, ...; got {placement.dims!r}.")
        return Cut(axis, len(dims), units=integers(f"{where}: local_units", placement.local_units))
    if hasattr(placement, "interleave"):
        blocks = _count(placement.interleave, f"{where}: interleave")
        return Cut(axis, _dim(placement.dim, ndim, where), blocks, equal=True)
    if _asks(placement, "is_partial"):
        raise LayoutError(
            f"{where}: a partial value still awaits a reduction over ranks, so a random number has no meaning for its "
            f"parts. Reduce it first: redistribute it to Replicate() or Shard(dim)."
        )
    if _asks(placement, "is_replicate"):
        return None
    types = sys.modules.get("torch.distributed.tensor.placement_types")
    # Only the classes themselves: a subclass may cut in another way.
    if types is not None and type(placement) is types._StridedShard:
        blocks = _count(placement.split_factor, f"{where}: split_factor")
        return Cut(axis, _dim(placement.dim, ndim, where), blocks)
    if types is not None and type(placement) is types.Shard:
        return Cut(axis, _dim(placement.dim, ndim, where))
    raise LayoutError(
        f"{where}: {type(placement).__module__}.{type(placement).__qualname__} is not a placement that is known here. "
        f"Known are Replicate, Shard, _StridedShard, interleaved shards (dim, interleave) and ragged shards (dims, "
        f"local_units)."
    )


def _asks(placement: Any, question: str) -> bool:
    method = getattr(placement, question, None)
    return callable(method) and bool(method())


def _dim(dim: Any, ndim: int, where: str) -> int:
    if type(dim) is not int or not -ndim <= dim < ndim:
        raise LayoutError(f"{where}: tensor dim {dim!r} does not exist in a tensor of {ndim} dims.")
    return dim % ndim


def _count(number: Any, where: str) -> int:
    if type(number) is not int or number < 1:
        raise LayoutError(f"{where}: expected a positive integer, but got {number!r}.")
    return number
