"""Tensor -> (part, local tensor): torch's DTensor, plain tensors, and through the plugin hook the classes of others.

This runs at every random operator, so the part of a DTensor is kept beside its spec object. Specs are looked up by
identity: comparing two of them costs more than the whole call.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch

from .._hooks import plugin_layout
from ..errors import LayoutError
from .boxes import part_of_boxes
from .mesh import part_of_axes, place_of
from .part import Box, Part, integers, whole

_PLAIN: tuple[Any, ...] = (torch.Tensor, torch.nn.Parameter)
_Entry = tuple[Any, Any, Any, Any, Part]
_parts: dict[int, _Entry] = {}
"""Id of a spec -> a weak reference to it, its tensor_meta, placements and mesh when seen, and the part."""


def part_of_tensor(tensor: torch.Tensor) -> tuple[Part, torch.Tensor]:
    """Return which elements of the whole this rank holds of `tensor`, and the plain local tensor that holds them.

    Args:
        tensor: a plain tensor (each rank holds the whole), a DTensor of torch, or a tensor of a class that a plugin
            knows (the hook `vescale_layout`).

    Returns:
        The part, and the local tensor: it shares memory with `tensor`.

    Raises:
        LayoutError: for a sparse or a partial tensor, a rank outside of the mesh, a local tensor that does not fit the
            placements, or a class that nobody here knows.

    Example:
        >>> part, local = part_of_tensor(torch.empty(2, 3))
        >>> part.is_whole
        True
    """
    kind = type(tensor)
    if kind in _PLAIN:
        _check_dense(tensor)
        return whole(tuple(tensor.shape), tensor.stride()), tensor
    dtensor = _torch_dtensor()
    if dtensor is None or not isinstance(tensor, dtensor):
        return _part_of_other(tensor)
    spec = tensor._spec  # type: ignore[attr-defined]
    entry = _parts.get(id(spec))
    # The fields are compared too, since torch fills in tensor_meta after it has made a spec.
    if (
        entry is not None
        and entry[0]() is spec
        and entry[1] is spec.tensor_meta
        and entry[2] is spec.placements
        and entry[3] is spec.mesh
    ):
        part = entry[4]
    else:
        part = _part_of_spec(spec)
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is not torch.Tensor:
        local = _awaited(local)
    if not part.fits(local):
        raise LayoutError(
            f"tensor: a DTensor of shape {part.global_shape} with placements {spec.placements} has a local tensor of "
            f"shape {part.local_shape} on this rank, but this one has {tuple(local.shape)}. If it comes from "
            f"DTensor.from_local, pass `shape` and `stride` of the whole, and local tensors cut as torch.chunk does."
        )
    return part, local


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise LayoutError(
            f"tensor: expected a dense tensor, but got {'a nested one' if tensor.is_nested else tensor.layout}, whose "
            "elements lie in no order of strides."
        )


def _torch_dtensor() -> type | None:
    # A DTensor can only exist where its module has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def _part_of_spec(spec: Any) -> Part:
    meta, placements, mesh = spec.tensor_meta, spec.placements, spec.mesh
    if meta is None:
        raise LayoutError(
            f"tensor: the spec {spec} of this DTensor has no shape yet. Give a tensor that has been made."
        )
    sizes, coordinate = place_of(mesh)
    part = part_of_axes(
        integers("tensor: shape", meta.shape),
        integers("tensor: stride", meta.stride),
        sizes,
        coordinate,
        placements,
        _order(spec, len(sizes)),
    )
    key, forget = id(spec), _parts.pop  # a name of this module is gone before the last spec is, at exit
    _parts[key] = (weakref.ref(spec, lambda _: forget(key, None)), meta, placements, mesh, part)
    return part


def _order(spec: Any, axes: int) -> list[int]:
    """Return the mesh axes in the order in which they cut the tensor.

    torch writes an order other than left to right either in `shard_order`, or in strided shards; then it says so.
    """
    order: list[int] = []
    if not getattr(spec, "use_strided_shard_as_shard_order", False):
        for entry in getattr(spec, "shard_order", None) or ():
            order += entry.mesh_dims
    return order + [axis for axis in range(axes) if axis not in order]


def _awaited(local: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a collective in flight writes to, after it has; other tensors as they are."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(local, module.AsyncCollectiveTensor):
        done: torch.Tensor = local.wait()
        return done
    return local


def _part_of_other(tensor: torch.Tensor) -> tuple[Part, torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"tensor: expected a torch.Tensor, but got {type(tensor).__qualname__}.")
    layout = plugin_layout(tensor)
    if layout is None:
        if not _is_plain(type(tensor)):
            raise LayoutError(
                f"tensor: no plugin knows how a {type(tensor).__module__}.{type(tensor).__qualname__} is sharded. If "
                f"each rank holds the whole of it, give its plain tensor; else a plugin must implement the hook "
                f"`vescale_layout` (see vescale_rng.hookspecs)."
            )
        _check_dense(tensor)
        return whole(tuple(tensor.shape), tensor.stride()), tensor
    if layout.partial:
        raise LayoutError(
            f"tensor: a {type(tensor).__qualname__} that is partial still awaits a reduction over ranks, so a random "
            f"number has no meaning for its parts. Reduce it first."
        )
    local = layout.local
    part = _part_of_layout(
        tuple(layout.global_shape),
        tuple(layout.global_stride),
        tuple((tuple(box.offset), tuple(box.shape)) for box in layout.boxes),
        tuple(local.shape),
    )
    return part, local


@functools.lru_cache(maxsize=4096)
def _part_of_layout(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    local_shape: tuple[int, ...],
) -> Part:
    found = part_of_boxes(shape, [Box(*box) for box in boxes], stride)
    if found.local_shape == local_shape:
        return found
    return Part(found.global_shape, found.global_stride, local_shape, found.boxes, None)


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Tell whether a class holds just the elements that it shows: those of torch, and those that override nothing.

    The classes of torch.distributed hold shards, and a class that overrides operators may.
    """
    module: str = kind.__module__
    if module.startswith("torch."):
        return not module.startswith("torch.distributed")
    # Of a class method, the function that all classes share.
    functions = [getattr(c.__torch_function__, "__func__", c.__torch_function__) for c in (kind, *_PLAIN)]
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and functions[0] in functions[1:]
