"""What other packages learn of a DTensor: which boxes of the whole are here, and what is still to be summed.

The attributes are the shared "layout" of this family of packages; nothing of it needs this package's types.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._comm.move import strip
from ._spec import Spec
from ._tensor import DTensor, make
from .errors import UnsupportedOperationError
from .placements import AxisTypes, I, P, R

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .hookspecs import Box


class LayoutBox(NamedTuple):
    """A block of the whole tensor."""

    offset: tuple[int, ...]
    """Its first element."""
    shape: tuple[int, ...]
    """Its length in every dim."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How this rank's part lies in the whole tensor."""

    global_shape: tuple[int, ...]
    """Shape of the whole."""
    global_stride: tuple[int, ...]
    """Strides that the whole would have on one device."""
    boxes: list[LayoutBox]
    """The local elements in the order of a contiguous `local`: one box, or several where a shard is ragged or
    interleaved."""
    local: Tensor
    """The local part; shares memory, carries no gradient."""
    replicas: tuple[int, int]
    """Which copy of the box this is, of how many."""
    partial: bool
    """Whether the value is a pending sum over ranks."""


def layout_of(tensor: Tensor) -> Layout | None:
    """Return the layout of a DTensor; None for other tensors. Communicates nothing."""
    if not isinstance(tensor, DTensor):
        return None
    spec = tensor._spec
    return Layout(
        tuple(spec.shape),
        tuple(tensor.stride()),
        _boxes(spec),
        strip(tensor).detach(),
        _replica(spec),
        any(t == P and spec.mesh.sizes[a] > 1 for a, t in enumerate(spec.types)),
    )


def _boxes(spec: Spec) -> list[LayoutBox]:
    if spec.irregular:
        return [LayoutBox(*box) for box in spec.boxes_of(spec.mesh.coordinate)]
    return [LayoutBox(spec.local_offset, spec.local_shape)]


def _holds(spec: Spec, wanted: list[LayoutBox]) -> bool:
    """Whether this rank holds just these boxes: in the order of the local part, or one per block of a dim."""
    if not spec.irregular:
        return _boxes(spec) == wanted
    pieces = [LayoutBox(*p.box) for p in spec.pieces_of(spec.mesh.coordinate).pieces]
    some = [box for box in wanted if 0 not in box.shape]
    return some in (_boxes(spec), pieces)


def _replica(spec: Spec) -> tuple[int, int]:
    index, count = 0, 1
    for axis, t in enumerate(spec.types):
        if t in (I, R):
            index = index * spec.mesh.sizes[axis] + spec.mesh.coordinate[axis]
            count *= spec.mesh.sizes[axis]
    return index, count


def from_layout(like: Tensor, boxes: Sequence[Box]) -> DTensor | None:
    """Allocate a DTensor like `like` whose local part is `boxes`; None for other tensors.

    Communicates nothing, so the placements are found from this rank's boxes: those of `like` where they give
    them, else the only other ones of `Shard` and `Replicate` that do.

    Raises:
        UnsupportedOperationError: no placements give the boxes, or several do.
    """
    if not isinstance(like, DTensor):
        return None
    spec = like._spec
    wanted = [LayoutBox(tuple(b.offset), tuple(b.shape)) for b in boxes]
    here = (
        spec.invariant if P not in spec.types else spec.with_types(tuple(I if t in (P, R) else t for t in spec.types))
    )
    if not _holds(here, wanted):
        here = _only_spec(spec, wanted)
    local = torch.empty(here.local_shape, dtype=like.dtype, device=like.device)
    return make(local, here)


def _only_spec(spec: Spec, wanted: list[LayoutBox]) -> Spec:
    choices = [*range(spec.ndim), I]
    found: list[AxisTypes] = []
    for types in itertools.product(choices, repeat=spec.mesh.ndim):
        candidate = spec.with_types(types)
        if _holds(candidate, wanted):
            found.append(types)
    if len(found) == 1:
        return spec.with_types(found[0])
    raise UnsupportedOperationError(
        f"the boxes {wanted} of a tensor of shape {list(spec.shape)} on {spec.mesh!r} "
        f"{'fit several placements' if found else 'fit no placements'}; pass a `like` that is placed as wanted"
    )


def gradient_reduction(param: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return the mesh, and its axes along which the gradient of `param` is a pending sum; None for plain tensors."""
    if not isinstance(param, DTensor):
        return None
    mesh = param._spec.mesh
    axes = tuple(a for a, t in enumerate(param._spec.types) if t == R and mesh.sizes[a] > 1)
    return mesh.device_mesh, axes
