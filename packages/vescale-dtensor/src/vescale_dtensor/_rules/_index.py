"""Reading an index expression `x[...]`: what each part does to which dim."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import policy
from .._dispatch.engine import label_one
from .._mesh import MeshInfo
from .._spec import Spec, replicated
from .._tap import alias
from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from ._windows import Range


class Part(NamedTuple):
    """One part of an index."""

    kind: str
    """``range`` (an int or a slice), ``new`` (None), ``bool``, ``tensor`` (of positions) or ``mask``."""
    dim: int
    """First dim of the indexed tensor that it acts on."""
    value: Any
    """A `Range`, a bool or a tensor."""


def parse(index: Any, shape: tuple[int, ...], mesh: MeshInfo) -> list[Part]:
    """Read an index of a tensor of `shape`; raises torch's errors for one that does not fit."""
    given = [_plain(i, mesh) for i in (index if isinstance(index, tuple) else (index,))]
    used = sum(_consumed(i) for i in given)
    if used > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    if sum(i is Ellipsis for i in given) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(i is Ellipsis for i in given):
        given.append(Ellipsis)
    parts, d = [], 0
    for i in given:
        if i is Ellipsis:
            for _ in range(len(shape) - used):
                parts.append(Part("range", d, Range(0, 1, shape[d], False)))
                d += 1
        elif i is None:
            parts.append(Part("new", d, None))
        elif isinstance(i, bool):
            parts.append(Part("bool", d, i))
        elif isinstance(i, slice):
            parts.append(Part("range", d, _slice(i, shape[d])))
            d += 1
        elif isinstance(i, Tensor):
            kind = "mask" if i.dtype in (torch.bool, torch.uint8) else "tensor"
            if kind == "mask" and tuple(i.shape) != tuple(shape[d : d + i.ndim]):
                raise IndexError(
                    f"The shape of the mask {list(i.shape)} at index {d} does not match the shape of the "
                    f"indexed tensor {list(shape)}"
                )
            parts.append(Part(kind, d, i))
            d += _consumed(i)
        else:
            if not -shape[d] <= i < shape[d]:
                raise IndexError(f"index {i} is out of bounds for dimension {d} with size {shape[d]}")
            parts.append(Part("range", d, Range(i % shape[d], 1, 1, True)))
            d += 1
    return parts


def _consumed(i: Any) -> int:
    if i is None or i is Ellipsis or isinstance(i, bool):
        return 0
    return i.ndim if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1


def _slice(s: slice, size: int) -> Range:
    step = 1 if s.step is None else operator.index(s.step)
    if step <= 0:
        raise ValueError("step must be greater than zero")
    start, stop, _ = slice(_bound(s.start), _bound(s.stop), step).indices(size)
    return Range(start, step, max(-(-(stop - start) // step), 0), False)


def _bound(value: Any) -> int | None:
    return None if value is None else host_int(value) if isinstance(value, Tensor) else operator.index(value)


def host_int(value: Tensor) -> int:
    """Read an integer from a tensor of one element."""
    return int(_whole(value).item())


def _whole(value: Tensor) -> Tensor:
    """All of a tensor, plain and outside any graph."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.full_tensor()


def _plain(i: Any, mesh: MeshInfo) -> Any:
    """Bring one part of an index to None, Ellipsis, bool, int, slice or a tensor of at least one dim, labelled."""
    if i is None or i is Ellipsis or isinstance(i, bool | int | slice):
        return i
    if isinstance(i, Tensor):
        if i.ndim == 0 and not i.dtype.is_floating_point:
            return bool(host_int(i)) if i.dtype in (torch.bool, torch.uint8) else host_int(i)
        if i.dtype not in _INDEX_DTYPES:
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, got {i.dtype}")
        if not isinstance(i, DTensor):
            if i.numel() != 1:
                policy.check_plain("an index", tuple(i.shape))
            i = label_one(alias(i), replicated(mesh, i.shape))
        return i
    if isinstance(i, list | tuple | range):
        try:
            value = torch.tensor(list(i)) if len(i) else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedOperationError(
                f"a DTensor was indexed by the sequence {i!r}, which is not a list of numbers; "
                "index by a tuple of slices and tensors"
            ) from error
        return _plain(label_one(value.to(mesh.device_type), replicated(mesh, value.shape)), mesh)
    if hasattr(i, "__array__"):
        return _plain(torch.as_tensor(i), mesh)
    return operator.index(i)


_INDEX_DTYPES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def replicated_indices(mask: DTensor) -> list[DTensor]:
    """Positions of the true elements of a mask, one tensor per dim, the same on every rank."""
    spec = mask._spec
    if spec.sharded and policy.state.communication != "allow":
        policy.report("indexing by a mask", [(spec, replicated(spec.mesh, spec.shape).types)])
    found = _whole(mask).nonzero(as_tuple=True)
    return [label_one(t, replicated(spec.mesh, t.shape)) for t in found]


def as_index(p: Part, *, taken: bool = False) -> Any:
    """Return the index of a part; of a range that was `taken` already, what is left to do."""
    if p.kind != "range":
        return p.value
    r: Range = p.value
    if r.single:
        return 0 if taken else r.start
    return slice(None) if taken else slice(r.start, r.start + r.length * r.step, r.step)


def is_full(r: Range, size: int) -> bool:
    """Whether a range takes a whole dim of `size`."""
    return not r.single and r.step == 1 and r.length == size


def cut_dims(parts: list[Part], spec: Spec) -> set[int]:
    """Sharded dims that the index does not take whole."""
    return {
        p.dim for p in parts if p.kind == "range" and p.dim in spec.sharded and not is_full(p.value, spec.shape[p.dim])
    }


def layout_of(parts: list[Part]) -> tuple[list[int], list[tuple[int, int]]]:
    """Shape of the result of ints, slices and None, and (input dim, result dim) of the dims that remain."""
    shape: list[int] = []
    pairs = []
    for p in parts:
        if p.kind == "new":
            shape.append(1)
        elif not p.value.single:
            pairs.append((p.dim, len(shape)))
            shape.append(p.value.length)
    return shape, pairs
