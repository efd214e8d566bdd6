"""`Spec`: how one global tensor lies on a mesh. Interned, so that equal specs are the same object.

Identity makes the caches of the dispatcher cheap: a spec hashes by address. A spec knows nothing
of dtype, because no sharding rule depends on one, and nothing of strides, because the global
stride follows from the local one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ._mesh import MeshInfo
from .placements import AxisTypes, I, R, duals, short

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a block of the global tensor."""


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, length) of part `index` of `size` elements, as `torch.chunk` cuts them.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def box_at(mesh: MeshInfo, shape: Sequence[int], types: AxisTypes, coordinate: Sequence[int]) -> Box:
    """Return the block of a tensor of `shape` that the rank at `coordinate` holds."""
    offset, length = [0] * len(shape), list(shape)
    for axis, dim in enumerate(types):
        if dim >= 0:
            start, length[dim] = chunk(length[dim], mesh.sizes[axis], coordinate[axis])
            offset[dim] += start
    return tuple(offset), tuple(length)


class Spec:
    """Mesh, global shape and axis types of a tensor; use `spec_of` to get the interned object."""

    __slots__ = (
        "__weakref__", "_dual", "_invariant", "cache", "even", "local_offset", "local_shape", "mesh", "ndim", "numel",
        "plans", "shape", "sharded", "types",
    )  # fmt: skip

    mesh: MeshInfo
    shape: torch.Size
    types: AxisTypes
    ndim: int
    numel: int
    local_shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    even: bool
    "Whether all ranks hold blocks of the same shape."
    _dual: Spec | None
    _invariant: Spec | None
    sharded: frozenset[int]
    "Tensor dims that some axis shards."
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

    def shards_of(self, dim: int) -> int:
        """Number of parts that `dim` is cut into, over all axes."""
        return math.prod(self.mesh.sizes[a] for a, t in enumerate(self.types) if t == dim)

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
    """Return the interned spec; `types` must be a valid tuple (see `placements.to_axis_types`)."""
    size = tuple(shape)
    key = (size, types)
    spec: Spec | None = mesh.specs.get(key)
    if spec is not None:
        return spec
    spec = _new(Spec)
    spec.mesh, spec.shape, spec.types = mesh, torch.Size(size), types
    spec.ndim, spec.numel = len(size), math.prod(size)
    spec.cache, spec.plans, spec._dual, spec._invariant = {}, {}, None, None
    spec.sharded = frozenset(t for t in types if t >= 0)
    spec.local_offset, spec.local_shape = box_at(mesh, size, types, mesh.coordinate)
    spec.even = all(size[d] % spec.shards_of(d) == 0 for d in spec.sharded)
    mesh.specs[key] = spec
    return spec


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
    position of a dim, the stride of that dim still tells: views keep it, as operators on them may not.
    """
    if tuple(local_stride) == contiguous_stride(spec.local_shape):
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
