"""Placements: how a tensor lies along one axis of a device mesh.

The public vocabulary is torch's own (`Shard`, `Replicate`, `Partial`), plus `Varying`.
Inside the package a placement is an *axis type*, a small integer, because axis types are
compared and hashed for every new combination of arguments:

====================  ==========  ==================================  ==================
public placement      axis type   value along the axis                its gradient is
====================  ==========  ==================================  ==================
`Shard(d)`            ``d >= 0``  cut along tensor dim d              `Shard(d)`
`Replicate()`         `I`         the same on every rank              the same everywhere
`Varying()`           `R`         the same on every rank              a pending sum
`Partial()`           `P`         a pending sum                       the same everywhere
====================  ==========  ==================================  ==================

The gradient column is the *dual* type: every communication-free computation over
{S, R, P} that is right forward is right backward with the duals (docs/design-notes.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard", "Varying"]

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


_PLACEMENT: dict[int, Placement] = {R: Varying(), I: Replicate(), P: Partial()}


def dual(axis_type: int) -> int:
    """Return the axis type of the gradient of a value of `axis_type`."""
    return axis_type if axis_type >= 0 else _DUAL[axis_type]


def duals(types: AxisTypes) -> AxisTypes:
    """Return `dual` of every entry."""
    return tuple(map(dual, types))


def to_placement(axis_type: int) -> Placement:
    """Return the public placement of an axis type."""
    return Shard(axis_type) if axis_type >= 0 else _PLACEMENT[axis_type]


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


def _axis_type(placement: Placement, ndim: int, where: str) -> int:
    if type(placement) is Shard:
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise ValueError(
                f"{where} = {placement!r}: tensor dim {placement.dim} does not exist in a tensor of {ndim} dims"
            )
        return dim
    if isinstance(placement, Varying):
        return R
    if isinstance(placement, Replicate):
        return I
    if isinstance(placement, Partial):
        if placement.reduce_op != "sum":
            raise ValueError(
                f"{where} = {placement!r}: only a pending sum can be kept; "
                "reduce a maximum, minimum or product at once, and scale the local part for an average"
            )
        return P
    raise TypeError(
        f"{where} = {placement!r}: expected Shard(dim), Replicate(), Varying() or Partial(), "
        f"got {type(placement).__name__}"
    )


def short(types: AxisTypes) -> str:
    """Spell axis types for messages, for example ``S(0),I``."""
    return ",".join(_LETTER.get(t, f"S({t})") for t in types)
