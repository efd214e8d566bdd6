"""`Spec`: how one global tensor lies on a mesh. Interned, so that equal specs are the same object.

Identity makes the caches of the dispatcher cheap: a spec hashes by address. A spec knows nothing
of dtype, because no sharding rule depends on one, and nothing of strides, because the global
stride follows from the local one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from ._irregular import Interleaved, Ragged, clash, cut_dims_of, is_irregular
from ._mesh import MeshInfo
from ._pieces import Box, Holding, boxes_in_order, chunk, holding
from .errors import UnsupportedOperationError
from .placements import AxisTypes, I, R, duals, short

__all__ = ["Box", "Spec", "box_at", "chunk", "contiguous_stride", "global_stride", "replicated", "spec_of"]


class _Offsets(tuple[int, ...]):
    """Offsets of a local part that is not one block: known for single dims, those that only `Shard` cuts.

    Code that takes them for the place of a block must not go on, so all else is an error.
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedOperationError(
            "a ragged or interleaved local part is several blocks of the tensor and has no offset; "
            "redistribute it to Shard(dim) or Replicate() first"
        )

    def __getitem__(self, dim: Any) -> Any:
        offset = tuple.__getitem__(self, dim) if dim.__class__ is int else -1
        return offset if offset >= 0 else self._refuse()

    __iter__ = __len__ = __eq__ = _refuse
    __hash__ = tuple.__hash__


def box_at(mesh: MeshInfo, shape: Sequence[int], types: AxisTypes, coordinate: Sequence[int]) -> Box:
    """Return the block of a tensor of `shape` that the rank at `coordinate` holds.

    Raises:
        UnsupportedOperationError: an axis cuts it otherwise than in blocks; see `Spec.pieces_of`.
    """
    if is_irregular(types):
        _Offsets()._refuse()
    offset, length = [0] * len(shape), list(shape)
    for axis, dim in enumerate(types):
        if dim >= 0:
            start, length[dim] = chunk(length[dim], mesh.sizes[axis], coordinate[axis])
            offset[dim] += start
    return tuple(offset), tuple(length)


class Spec:
    """Mesh, global shape and axis types of a tensor; use `spec_of` to get the interned object."""

    __slots__ = (
        "__weakref__", "_dual", "_invariant", "cache", "even", "irregular", "local_offset", "local_shape", "mesh",
        "ndim", "numel", "plans", "shape", "sharded", "types",
    )  # fmt: skip

    mesh: MeshInfo
    shape: torch.Size
    types: AxisTypes
    ndim: int
    numel: int
    local_shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    "Of the block that this rank holds; where `irregular`, an error to look at, but for single dims that are blocks."
    irregular: bool
    "Whether an axis cuts otherwise than in blocks: the local part is several of them, see `pieces_of`."
    even: bool
    "Whether all ranks hold blocks of the same shape."
    _dual: Spec | None
    _invariant: Spec | None
    sharded: frozenset[int]
    "Tensor dims that some axis cuts."
    cache: dict[Any, Any]
    "Dispatcher entries of functions whose only tensor argument has this spec."
    plans: dict[AxisTypes, Any]
    "Redistribution plans by destination types."

    @property
    def dual(self) -> Spec:
        """Spec of the gradient of a tensor of this spec."""
        found = self._dual
        if found is None:
            found = self._dual = spec_of(self.mesh, self.shape, duals(self.types))
        return found

    @property
    def invariant(self) -> Spec:
        """This spec with every R turned into I: what a value computed without gradients is."""
        found = self._invariant
        if found is None:
            found = self._invariant = self.with_types(tuple(I if t == R else t for t in self.types))
        return found

    def with_types(self, types: AxisTypes) -> Spec:
        """The same tensor, laid out otherwise."""
        return spec_of(self.mesh, self.shape, types)

    def box_of(self, coordinate: Sequence[int]) -> Box:
        """Block that the rank at `coordinate` holds."""
        return box_at(self.mesh, self.shape, self.types, coordinate)

    def pieces_of(self, coordinate: Sequence[int]) -> Holding:
        """What the rank at `coordinate` holds, whatever cuts it."""
        return holding(self.mesh.sizes, self.shape, self.types, coordinate)

    def boxes_of(self, coordinate: Sequence[int]) -> list[Box]:
        """What the rank at `coordinate` holds, as blocks in the order of a contiguous local part."""
        return boxes_in_order(self.mesh.sizes, self.shape, self.types, coordinate)

    def shards_of(self, dim: int) -> int:
        """Number of parts that `dim` is cut into, over all axes."""
        return math.prod(self.mesh.sizes[a] for a, t in enumerate(self.types) if dim in cut_dims_of(t))

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def __copy__(self) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.mesh, tuple(self.shape), self.types)

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}]({short(self.types)})"


_new = object.__new__


def spec_of(mesh: MeshInfo, shape: Iterable[int], types: AxisTypes) -> Spec:
    """Return the interned spec; `types` must be a valid tuple (see `placements.to_axis_types`).

    Raises:
        ValueError: irregular cuts that do not fit the shape, the mesh or each other.
    """
    size = tuple(shape)
    key = (size, types)
    spec: Spec | None = mesh.specs.get(key)
    if spec is not None:
        return spec
    spec = _new(Spec)
    spec.mesh, spec.shape, spec.types = mesh, torch.Size(size), types
    spec.ndim, spec.numel = len(size), math.prod(size)
    spec.cache, spec.plans, spec._dual, spec._invariant = {}, {}, None, None
    spec.irregular = is_irregular(types)
    if spec.irregular:
        _check_fit(mesh, size, types)
        spec.sharded = frozenset(itertools.chain.from_iterable(map(cut_dims_of, types)))
        blocks = tuple(t if t >= 0 else I for t in types)
        torn = {d for t in types if t < 0 for d in cut_dims_of(t)}
        offset, _ = box_at(mesh, size, blocks, mesh.coordinate)
        spec.local_offset = _Offsets(-1 if d in torn else o for d, o in enumerate(offset))
        spec.local_shape = spec.pieces_of(mesh.coordinate).shape
        spec.even = _is_even(spec)
    else:
        spec.sharded = frozenset(t for t in types if t >= 0)
        spec.local_offset, spec.local_shape = box_at(mesh, size, types, mesh.coordinate)
        spec.even = all(size[d] % spec.shards_of(d) == 0 for d in spec.sharded)
    mesh.specs[key] = spec
    return spec


def _check_fit(mesh: MeshInfo, shape: tuple[int, ...], types: AxisTypes) -> None:
    problem = clash(types)
    for axis, t in enumerate(types):
        if isinstance(t, Interleaved) and shape[t.dim] % t.blocks:
            problem = f"dim {t.dim} has {shape[t.dim]} positions, which are not {t.blocks} equal blocks"
        if isinstance(t, Ragged) and len(t.units) != mesh.sizes[axis]:
            problem = (
                f"mesh axis {mesh.axis_name(axis)!r} has {mesh.sizes[axis]} ranks, but local_units are "
                f"{len(t.units)}: {t.units}"
            )
    if problem is not None:
        raise ValueError(
            f"a tensor of shape {list(shape)} cannot be placed ({short(types)}) on {mesh!r}: {problem}. Choose "
            "placements that fit, or Shard(dim)"
        )


def _is_even(spec: Spec) -> bool:
    """Whether all ranks hold parts of the same shape, for irregular cuts."""
    sizes, per_dim = spec.mesh.sizes, [*spec.shape]
    rows = 1
    for axis, t in enumerate(spec.types):
        if isinstance(t, Ragged):
            if len(set(t.units)) != 1:
                return False
            rows *= sizes[axis]
            continue
        for dim in cut_dims_of(t):
            blocks = t.blocks if isinstance(t, Interleaved) else 1
            if per_dim[dim] % (sizes[axis] * blocks):
                return False
            per_dim[dim] //= sizes[axis]
    lead = next((t.lead for t in spec.types if isinstance(t, Ragged)), 0)
    return bool(math.prod(per_dim[:lead]) % rows == 0)


def replicated(mesh: MeshInfo, shape: Iterable[int]) -> Spec:
    """Return the spec of a tensor that every rank holds in full."""
    return spec_of(mesh, shape, (I,) * mesh.ndim)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor of `shape`."""
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def global_stride(spec: Spec, local_stride: Sequence[int]) -> tuple[int, ...]:
    """Return the stride that the whole tensor would have if laid out in memory as the local part is.

    Dims keep their order in memory; a broadcast dim (stride 0) stays one. Where this rank holds at most one
    position of a dim, the stride of that dim still tells: views keep it, as operators on them may not. What a
    ragged shard flattens lies in the usual order.
    """
    if tuple(local_stride) == contiguous_stride(spec.local_shape):
        return contiguous_stride(spec.shape)
    if spec.irregular and any(isinstance(t, Ragged) and t.lead > 1 for t in spec.types):
        return contiguous_stride(spec.shape)
    # A dim of one position has the stride of the dim around it.
    order = sorted(range(spec.ndim), key=lambda d: (local_stride[d], max(spec.local_shape[d], 1), -d))
    stride = list(local_stride)
    factor_num, factor_den = 1, 1
    for d in order:
        if local_stride[d] == 0:
            continue
        stride[d] = local_stride[d] * factor_num // factor_den
        if d in spec.sharded:
            factor_num *= spec.shape[d]
            factor_den *= max(spec.local_shape[d], 1)
    return tuple(stride)
