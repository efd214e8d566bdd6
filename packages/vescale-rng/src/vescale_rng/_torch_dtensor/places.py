"""What the handlers need to know of a DTensor, kept beside its spec object so that it is worked out once.

A place also keeps the specs of results that were made from it (`rand_like`, dropout's outputs), so the second result of
a kind costs one allocation and one constructor call.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._layout import Part, part_of_tensor
from ..errors import LayoutError

__all__ = ["Like", "Place", "dense_stride", "forget_places", "place_of"]


class Like:
    """How to make a result that is sharded as a given DTensor is, with other strides or another dtype."""

    __slots__ = ("dtype", "local_shape", "local_stride", "spec")

    def __init__(
        self, spec: DTensorSpec, dtype: torch.dtype, local_shape: tuple[int, ...], local_stride: tuple[int, ...]
    ) -> None:
        self.spec, self.dtype, self.local_shape, self.local_stride = spec, dtype, local_shape, local_stride

    def empty(self, device: torch.device, *, pin_memory: bool = False) -> DTensor:
        """Return a DTensor whose local part is not filled yet."""
        local = torch.empty_strided(
            self.local_shape, self.local_stride, dtype=self.dtype, device=device, pin_memory=pin_memory
        )
        return wrap(local, self.spec)


class Place:
    """Where the local part of a DTensor stands in the whole; everything is as of the spec when it was seen."""

    __slots__ = ("__weakref__", "agreed", "inside", "likes", "mesh", "meta", "overlaps", "part", "placements", "spec")

    def __init__(self, spec: weakref.ref[DTensorSpec], tensor: DTensor) -> None:
        seen = tensor._spec
        self.spec, self.placements, self.mesh = spec, seen.placements, seen.mesh
        meta: Any = seen.tensor_meta  # of a tensor it is never None
        self.meta = meta
        self.overlaps = _overlaps(tuple(meta.shape), tuple(meta.stride))
        """Whether elements of the whole share a place in memory, as after `expand`."""
        self.inside = seen.mesh.get_coordinate() is not None
        """Whether this rank is in the mesh; others hold nothing and draw nothing."""
        self.part: Part = part_of_tensor(tensor)[0] if self.inside else _NOTHING
        self.agreed = False
        """Whether the default generators are known to agree, or need not be compared."""
        self.likes: dict[tuple[Any, ...], Like] = {}

    def like(self, dtype: torch.dtype | None = None, memory_format: torch.memory_format | None = None) -> Like:
        """Return how to make what `torch.empty_like` makes."""
        key = (dtype, memory_format)
        found = self.likes.get(key)
        if found is None:
            found = self.likes[key] = self.like_meta(self._empty_like(dtype, memory_format))
        return found

    def _empty_like(self, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Tensor:
        shape, stride = tuple(self.meta.shape), tuple(self.meta.stride)
        meta = torch.empty_strided(shape, stride, dtype=dtype or self.meta.dtype, device="meta")
        if memory_format not in (None, torch.preserve_format):
            return torch.empty_like(meta, memory_format=memory_format)
        # Tensors on the meta device do not keep the strides of dims of size 1, those on a CPU do.
        return meta if _is_dense(shape, stride) else torch.empty_like(meta)

    def like_meta(self, meta: Tensor) -> Like:
        """Return how to make a tensor of the shape of this one, with the dtype and strides of `meta`."""
        spec = self.spec()
        if spec is None:  # pragma: no cover: a place is only reached through its spec
            raise RuntimeError("the spec of a place is gone")
        # A copy even where nothing differs: a spec that its own place keeps would never be freed.
        spec = copy.copy(spec)
        spec.tensor_meta = TensorMeta(meta.shape, meta.stride(), meta.dtype)
        shape = self.part.local_shape
        stride = dense_stride(shape, meta.stride()) if self.inside else (1,)
        return Like(spec, meta.dtype, shape, stride)


_NOTHING = Part((0,), (1,), (0,), (), ())
_places: dict[int, Place] = {}
"""By id of the spec: to compare two specs costs more than a small draw."""


def place_of(tensor: DTensor) -> Place:
    """Return the place of a DTensor.

    Raises:
        LayoutError: for a partial tensor, or placements that are not known.
    """
    spec = tensor._spec
    place = _places.get(id(spec))
    # The fields are compared too: torch sets tensor_meta of a spec after it has made it.
    if (
        place is not None
        and place.spec() is spec
        and place.meta is spec.tensor_meta
        and place.placements is spec.placements
    ):
        return place
    key = id(spec)
    if any(placement.is_partial() for placement in spec.placements):
        raise LayoutError(
            f"a random operator was called on a DTensor with placements {spec.placements}: a partial value still "
            "awaits a reduction over ranks, so random numbers have no meaning for its parts. Redistribute it to "
            "Replicate() or Shard(dim) first"
        )
    place = _places[key] = Place(weakref.ref(spec, functools.partial(_forget, key)), tensor)
    return place


def _forget(key: int, _: Any, places: dict[int, Place] = _places) -> None:
    places.pop(key, None)  # at the exit of Python the name in the module may be gone before the dict


def forget_places() -> None:
    """Forget all places, and with them which generators agreed."""
    _places.clear()


def wrap(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor around a local tensor."""
    made: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return 0 not in shape and any(n > 1 and not step for n, step in zip(shape, stride, strict=True))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether torch counts a tensor as non-overlapping and dense, so that results like it have its strides."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def dense_stride(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims stand in the order of the strides `like`.

    >>> dense_stride((2, 3, 4), (1, 2, 6))
    (1, 2, 6)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
