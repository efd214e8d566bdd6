"""Placements: how a tensor lies along one axis of a device mesh.

The public vocabulary is torch's own (`Shard`, `Replicate`, `Partial`), plus `Varying`, `RaggedShard` and
`InterleavedShard`. Inside the package a placement is an *axis type*, a small integer, because axis types are
compared and hashed for every new combination of arguments:

==========================  ============  ==================================  ==================
public placement            axis type     value along the axis                its gradient is
==========================  ============  ==================================  ==================
`Shard(d)`                  ``d >= 0``    cut along tensor dim d              `Shard(d)`
`Replicate()`               `I`           the same on every rank              the same everywhere
`Varying()`                 `R`           the same on every rank              a pending sum
`Partial()`                 `P`           a pending sum                       the same everywhere
`RaggedShard(dims, units)`  below `P`     a piece of the flattened dims       cut in the same way
`InterleavedShard(d, k)`    below `P`     a part of each of k blocks of d     cut in the same way
==========================  ============  ==================================  ==================

The gradient column is the *dual* type: every communication-free computation over
{S, R, P} that is right forward is right backward with the duals (docs/design-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ._irregular import Interleaved, Ragged, interleaved, ragged

__all__ = ["InterleavedShard", "Partial", "Placement", "RaggedShard", "Replicate", "Shard", "Varying"]

R, I, P = -1, -2, -3  # noqa: E741  (the literature's names)

AxisTypes = tuple[int, ...]
"""One axis type per mesh axis."""

_DUAL = {R: P, P: R, I: I}
_LETTER = {R: "R", I: "I", P: "P"}


class Varying(Replicate):
    """The value is the same on every rank of the axis, its gradient is a pending sum.

    Compares equal to `Replicate()`: the values are laid out alike. Use it for a parameter whose
    gradient you reduce yourself, for example in buckets after the backward pass.

    >>> Varying() == Replicate()
    True
    """

    def __repr__(self) -> str:
        return "Varying()"

    __str__ = __repr__


class RaggedShard(Placement):
    """Each rank of the axis holds a contiguous piece of the flattened leading dims, in proportion to its units.

    For buffers that are cut at borders of blocks, whatever their number: an optimizer state or a quantization block
    is never torn. Beside `Shard` on other mesh axes, the shards cut first and the ragged axis takes its piece of what
    they leave, in either order of the axes.

    The local part keeps the number of dims: all of `dims` but the last have length 1, and the last has the piece.

    Args:
        dims: the leading dims ``(0, 1, ..., n - 1)``.
        local_units: one per rank of the mesh axis: rank i holds ``local_units[i] / sum(local_units)`` of the rows.
            Zero for a rank that holds nothing. Where the sum does not divide the rows, borders are rounded down.

    Raises:
        ValueError: `dims` are not the leading ones, or the units are negative or all zero.

    >>> RaggedShard((0, 1), (3, 0, 1))  # of a (4, 6) tensor, ranks hold 18, 0 and 6 elements
    RaggedShard(dims=(0, 1), local_units=(3, 0, 1))
    """

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()
        found, units = tuple(dims), tuple(local_units)
        if not found or found != tuple(range(len(found))):
            raise ValueError(f"dims = {found}: a ragged shard flattens the leading dims; give (0,), (0, 1), ...")
        if any(u.__class__ is not int or u < 0 for u in units) or not sum(units):
            raise ValueError(
                f"local_units = {units}: expected one count >= 0 per rank of the mesh axis, not all of them zero"
            )
        self._dims, self._units = found, units

    @property
    def dims(self) -> tuple[int, ...]:
        """Tensor dims that are flattened."""
        return self._dims

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units that each rank holds."""
        return self._units

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self._dims, self._units) == (other._dims, other._units)

    def __hash__(self) -> int:
        return hash((RaggedShard, self._dims, self._units))

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self._dims, self._units)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self._dims}, local_units={self._units})"

    __str__ = __repr__


class InterleavedShard(Placement):
    """`interleave` equal blocks of one dim, each of which is cut as `Shard` would cut it.

    For merged weights, such as q, k and v in one matrix: every rank holds its part of each of the three, and
    ``(x @ qkv).chunk(3, -1)`` gives three plain shards without communication.

    Args:
        dim: tensor dim; negative ones count from the end.
        interleave: number of blocks; it must divide the length of the dim. One block is `Shard(dim)`.

    Raises:
        ValueError: `interleave` is not positive.

    >>> InterleavedShard(0, 3)
    InterleavedShard(dim=0, interleave=3)
    """

    def __init__(self, dim: int, interleave: int) -> None:
        super().__init__()
        if interleave < 1:
            raise ValueError(f"interleave = {interleave}: expected the number of blocks of the dim, at least 1")
        self._dim, self._interleave = dim, interleave

    @property
    def dim(self) -> int:
        """Tensor dim that is cut."""
        return self._dim

    @property
    def interleave(self) -> int:
        """Number of blocks of the dim."""
        return self._interleave

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InterleavedShard) and self._dim == other._dim and self._interleave == other._interleave

    def __hash__(self) -> int:
        return hash((InterleavedShard, self._dim, self._interleave))

    def __reduce__(self) -> tuple[Any, ...]:
        return InterleavedShard, (self._dim, self._interleave)

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self._dim}, interleave={self._interleave})"

    __str__ = __repr__


_PLACEMENT: dict[int, Placement] = {R: Varying(), I: Replicate(), P: Partial()}


def dual(axis_type: int) -> int:
    """Return the axis type of the gradient of a value of `axis_type`."""
    return axis_type if axis_type >= 0 else _DUAL.get(axis_type, axis_type)


def duals(types: AxisTypes) -> AxisTypes:
    """Return `dual` of every entry."""
    return tuple(map(dual, types))


def to_placement(axis_type: int) -> Placement:
    """Return the public placement of an axis type."""
    if axis_type >= 0:
        return Shard(axis_type)
    if isinstance(axis_type, Ragged):
        return RaggedShard(axis_type.dims, axis_type.units)
    if isinstance(axis_type, Interleaved):
        return InterleavedShard(axis_type.dim, axis_type.blocks)
    return _PLACEMENT[axis_type]


def to_axis_types(
    placements: Sequence[Placement], *, mesh_ndim: int, ndim: int, argument: str = "placements"
) -> AxisTypes:
    """Translate public placements, one per mesh axis, for a tensor of `ndim` dims.

    Raises:
        TypeError: an entry is not a placement, or one that this package does not know.
        ValueError: wrong length, a tensor dim out of range, or a reduction other than a sum.
    """
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise TypeError(
            f"{argument} must be a sequence with one placement per mesh axis, got {placements!r}; "
            f"write [{placements!r}] for a one-dimensional mesh"
        )
    if len(placements) != mesh_ndim:
        raise ValueError(
            f"{argument} has {len(placements)} entries ({list(placements)}) for a mesh of {mesh_ndim} axes; "
            "give one placement per mesh axis"
        )
    return tuple(_axis_type(p, ndim, f"{argument}[{axis}]") for axis, p in enumerate(placements))


def _shard(placement: Any, ndim: int, where: str) -> int:
    dim: int = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise ValueError(
            f"{where} = {placement!r}: tensor dim {placement.dim} does not exist in a tensor of {ndim} dims"
        )
    return interleaved(dim, placement.interleave) if isinstance(placement, InterleavedShard) else dim


def _ragged(placement: RaggedShard, ndim: int, where: str) -> int:
    if len(placement.dims) > ndim:
        raise ValueError(f"{where} = {placement!r}: a tensor of {ndim} dims has no dims {placement.dims} to flatten")
    return ragged(len(placement.dims), placement.local_units)


def _pending(placement: Partial, ndim: int, where: str) -> int:
    if placement.reduce_op != "sum":
        raise ValueError(
            f"{where} = {placement!r}: only a pending sum can be kept; "
            "reduce a maximum, minimum or product at once, and scale the local part for an average"
        )
    return P


_AXIS_TYPE: tuple[tuple[type, Callable[[Any, int, str], int]], ...] = (
    (InterleavedShard, _shard),
    (RaggedShard, _ragged),
    (Varying, lambda p, ndim, where: R),
    (Replicate, lambda p, ndim, where: I),
    (Partial, _pending),
)
"""Classes of placements, with what translates them; the first that fits."""


def _axis_type(placement: Placement, ndim: int, where: str) -> int:
    if type(placement) is Shard:  # a subclass may cut otherwise
        return _shard(placement, ndim, where)
    for cls, translate in _AXIS_TYPE:
        if isinstance(placement, cls):
            return translate(placement, ndim, where)
    raise TypeError(
        f"{where} = {placement!r}: expected Shard(dim), Replicate(), Varying(), Partial(), RaggedShard(dims, units) or "
        f"InterleavedShard(dim, blocks), got {type(placement).__name__}"
    )


def short(types: AxisTypes) -> str:
    """Spell axis types for messages, for example ``S(0),I``."""
    return ",".join(f"S({t})" if t >= 0 else _LETTER.get(t) or str(t) for t in types)
