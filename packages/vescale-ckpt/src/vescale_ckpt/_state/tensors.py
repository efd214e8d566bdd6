"""Tensors of all kinds -> which elements this rank holds, and views of the memory where they lie.

A class that holds other bytes than it shows is refused unless it is known: bytes of a wrapper under the name of what
it wraps are a checkpoint that loads without complaint and is wrong.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._geometry import Box, Explicit, Layout, Rule
from .._hooks import plugin_layout
from ..errors import LayoutError, StateError
from .dtypes import DTYPES, dtype_name
from .rules import replicated, rule_of

__all__ = ["Held", "TensorSpec", "describe", "memory", "plain"]

_PLAIN: tuple[Any, ...] = (Tensor, torch.nn.Parameter)
_NO_DATA = ("FakeTensor", "FunctionalTensor")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor, as all ranks see it."""

    name: str
    """Its name in the state."""
    dtype: str
    """torch's name for the dtype, without "torch."."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    layout: Layout
    """Which writer holds what."""


@dataclass(slots=True)
class Held:
    """What this rank holds of a tensor."""

    spec: TensorSpec
    """The whole."""
    parts: list[tuple[Box, Tensor]]
    """Boxes that are not empty, each with a view of this rank's memory of the shape of the box."""


@dataclass(slots=True)
class _Source:
    """A tensor of known kind."""

    tensor: Tensor
    """The tensor itself."""
    local: Tensor
    """The plain tensor where this rank's elements lie."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    dtensor: Any = None
    """The tensor, where it is a DTensor of torch."""
    layout: Any = None
    """What a plugin said."""


def describe(name: str, tensor: Tensor, ranks: Sequence[int], rank: int) -> Held:
    """Tell how a tensor is laid out over the writers, and where this rank's part lies.

    Args:
        name: its name in the state.
        tensor: a plain tensor, which all writers hold; a DTensor of torch; or a tensor of a class that a plugin knows.
        ranks: global rank of each writer; pass the same object for all tensors.
        rank: number of this writer.

    Returns:
        The spec, and views of the memory; for layouts without a rule, the spec has the boxes of this rank only.

    Raises:
        StateError: a tensor without data, or of a class that nobody knows.
        LayoutError: a layout that cannot be told, or a local tensor that does not fit it.

    Example:
        >>> held = describe("w", torch.zeros(2, 3), (0,), 0)
        >>> held.spec.shape, held.spec.layout.placements
        ((2, 3), ('R',))
    """
    source = _source(tensor, name)
    layout = _layout(source, name, ranks, rank)
    spec = TensorSpec(name, dtype_name(source.local.dtype), source.shape, layout)
    return Held(spec, _parts(source, layout, name, rank))


def plain(name: str, tensor: Tensor) -> Held:
    """Describe a tensor of which this rank has its own, as `describe` does for one writer.

    Raises:
        StateError: also for a DTensor, which is no rank's own.

    Example:
        >>> plain("rng", torch.zeros(4)).parts[0][1].shape
        torch.Size([4])
    """
    source = _source(tensor, name)
    if source.dtensor is not None or source.layout is not None:
        raise StateError(
            f"state: {name} is marked as this rank's own with local(...), but it is a sharded tensor, of which other "
            f"ranks hold the rest. Take it out of the mark, or mark its local part."
        )
    spec = TensorSpec(name, dtype_name(tensor.dtype), source.shape, replicated(1))
    return Held(spec, _parts(source, spec.layout, name, 0))


def memory(tensor: Tensor, name: str) -> tuple[Hashable, Tensor]:
    """Return a key that two tensors share exactly if they are the same elements in the same memory.

    Args:
        tensor: any tensor that can be saved.
        name: for messages.

    Returns:
        The key, and the tensor to keep alive as long as the key is used.

    Raises:
        StateError: the tensor cannot be saved.
        LayoutError: a plugin says of it what makes no sense.
    """
    source = _source(tensor, name)
    local = source.local
    try:
        empty = not local.numel()
        place = (local.untyped_storage()._cdata, local.storage_offset()) if empty else local.data_ptr()
    except RuntimeError:
        raise StateError(
            f"state: {name} is a tensor inside of a transformation (vmap, grad, compile), which has no memory of its "
            f"own. Save it outside."
        ) from None
    whole: Hashable = None
    if source.dtensor is not None:
        whole = (source.shape, source.dtensor.device_mesh, tuple(source.dtensor.placements))
    elif source.layout is not None:
        whole = (source.shape, tuple((tuple(box.offset), tuple(box.shape)) for box in source.layout.boxes))
    bits = (local.is_conj(), local.is_neg())
    return (place, local.shape, local.stride(), local.dtype, str(local.device), bits, whole), local


def _source(tensor: Tensor, name: str) -> _Source:
    kind: Any = type(tensor)
    if kind in _PLAIN:
        _check(tensor, name)
        return _Source(tensor, tensor, tuple(tensor.shape))
    if torch.nn.parameter.is_lazy(tensor):
        raise StateError(
            f"state: {name} is a {kind.__name__} of a lazy module, which has no shape yet. Run the module once on an "
            f"input first."
        )
    if kind.__name__ in _NO_DATA:
        raise _no_data(name, f"a {kind.__name__}")
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        return _source(tensor.wait(), name)
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        local = tensor._local_tensor
        if functional is not None and isinstance(local, functional.AsyncCollectiveTensor):
            local = local.wait()
        _check_inner(local, name)
        return _Source(tensor, local, tuple(tensor.shape), dtensor=tensor)
    layout = plugin_layout(tensor)
    if layout is not None:
        _check_inner(layout.local, name)
        return _Source(tensor, layout.local, tuple(int(size) for size in layout.global_shape), layout=layout)
    if not _overrides_nothing(kind):
        raise _unknown(tensor, name, "")
    _check(tensor, name)
    return _Source(tensor, tensor, tuple(tensor.shape))


def _check_inner(local: Tensor, name: str) -> None:
    kind: Any = type(local)
    if kind.__name__ in _NO_DATA:
        raise _no_data(name, f"sharded over a {kind.__name__}")
    if kind not in _PLAIN and not _overrides_nothing(kind):
        raise _unknown(local, name, "sharded, and its local tensor is ")
    _check(local, name)


def _check(tensor: Tensor, name: str) -> None:
    if tensor.device.type == "meta":
        raise _no_data(name, "a tensor on the meta device")
    if tensor.is_nested:
        raise StateError(f"state: {name} is a nested tensor. Save its values() and offsets(), or the tensors in it.")
    if tensor.is_quantized:
        raise StateError(f"state: {name} is a quantized tensor. Save its int_repr(), scales and zero points.")
    if tensor.layout is not torch.strided:
        raise StateError(
            f"state: {name} is a tensor of layout {tensor.layout}. Save its indices and values, or its to_dense()."
        )
    if tensor.dtype not in DTYPES.values():
        raise StateError(f"state: {name} has the dtype {tensor.dtype}. Saved are {', '.join(DTYPES)}; view it as one.")


def _no_data(name: str, what: str) -> StateError:
    return StateError(
        f"state: {name} is {what}, which has no data. Materialize it first, for example with "
        f"module.to_empty(device=...) before loading."
    )


def _unknown(tensor: Tensor, name: str, what: str) -> StateError:
    kind = type(tensor)
    return StateError(
        f"state: {name} is {what}a {kind.__module__}.{kind.__qualname__}, a tensor class that may hold other bytes "
        f"than it shows, and no plugin knows it. Save the plain tensors inside of it, convert it to a plain tensor, or "
        f"implement the hook vescale_layout (see vescale_ckpt.hookspecs)."
    )


@functools.cache
def _overrides_nothing(kind: Any) -> bool:
    """Tell whether a class holds just the elements that it shows: it overrides no operator."""
    if kind.__module__.startswith("torch.") and not kind.__module__.startswith("torch.nn."):
        return False
    # Of a class method, the function that all classes share.
    functions = [getattr(c.__torch_function__, "__func__", c.__torch_function__) for c in (kind, *_PLAIN)]
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ and functions[0] in functions[1:]


def _layout(source: _Source, name: str, ranks: Sequence[int], rank: int) -> Layout:
    ndim = len(source.shape)
    if source.dtensor is not None:
        tensor = source.dtensor
        return rule_of(tensor.device_mesh, tensor.placements, ndim, ranks, name, tensor._spec)
    if source.layout is None:
        return replicated(len(ranks))
    if source.layout.partial:
        raise LayoutError(
            f"state: {name} still awaits a reduction over ranks. Redistribute it to Replicate() or Shard(dim) before "
            f"you save it or load into it."
        )
    boxes = tuple(_plugin_box(box, source.shape, name) for box in source.layout.boxes)
    return _plugin_rule(source, boxes, name, ranks, rank) or Explicit(((rank, boxes),))


def _plugin_box(box: Any, shape: tuple[int, ...], name: str) -> Box:
    found = Box(tuple(int(n) for n in box.offset), tuple(int(n) for n in box.shape))
    fits = found.ndim == len(shape) == len(found.offset)
    if not fits or min((*found.offset, *found.shape), default=0) < 0 or not Box.whole(shape).contains(found):
        raise LayoutError(f"state: the plugin for {name} says {found}, which does not lie in a tensor of {shape}.")
    return found


def _plugin_rule(source: _Source, boxes: tuple[Box, ...], name: str, ranks: Sequence[int], rank: int) -> Rule | None:
    """Return the rule of a tensor that has a mesh and placements like torch's, if it gives the plugin's boxes."""
    mesh, placements = getattr(source.tensor, "device_mesh", None), getattr(source.tensor, "placements", None)
    if not hasattr(mesh, "mesh") or placements is None:
        return None
    try:
        rule = rule_of(mesh, placements, len(source.shape), ranks, name)
        given = rule.boxes(source.shape, rank)
    except LayoutError:
        return None
    return rule if _same_elements(given, tuple(box for box in boxes if box.numel)) else None


def _same_elements(blocks: tuple[Box, ...], boxes: tuple[Box, ...]) -> bool:
    """Tell whether boxes make up blocks: storage order tears a block of an inner dim into a box per outer index."""
    return blocks == boxes or (
        len(blocks) < len(boxes)
        and sum(block.numel for block in blocks) == sum(box.numel for box in boxes)
        and all(any(block.contains(box) for block in blocks) for box in boxes)
    )


def _parts(source: _Source, layout: Layout, name: str, rank: int) -> list[tuple[Box, Tensor]]:
    local = source.local.detach()
    boxes = layout.boxes(source.shape, rank)
    if sum(box.numel for box in boxes) != local.numel():
        raise LayoutError(
            f"state: {name}: rank {rank} should hold {sum(box.numel for box in boxes)} elements of a tensor of shape "
            f"{source.shape}, but its local tensor of shape {tuple(local.shape)} has {local.numel()}. If it comes from "
            f"DTensor.from_local, pass `shape` and `stride` of the whole, and local tensors cut as torch.chunk does."
        )
    windows = layout.windows(source.shape, rank)
    # What a plugin calls the local tensor may be its storage. That of torch has the shape of the box or is a mistake.
    flat = source.layout is not None and len(boxes) == 1 and tuple(local.shape) != boxes[0].shape
    if windows is None or flat:
        return _in_a_row(local, boxes, name)
    parts = []
    for box, window in zip(boxes, windows, strict=True):
        view = local[tuple(slice(start, stop) for start, stop in window)] if window else local
        if tuple(view.shape) != box.shape:
            raise LayoutError(
                f"state: {name}: the local tensor of rank {rank} has the shape {tuple(local.shape)}, where {box} "
                f"should lie at {window}."
            )
        parts.append((box, view))
    return parts


def _in_a_row(local: Tensor, boxes: Sequence[Box], name: str) -> list[tuple[Box, Tensor]]:
    if local.ndim != 1 and not local.is_contiguous():
        raise LayoutError(
            f"state: {name}: boxes that stand one after the other need a local tensor that is 1-D or contiguous; this "
            f"one has shape {tuple(local.shape)} and strides {local.stride()}."
        )
    flat, parts, begin = local if local.ndim == 1 else local.view(-1), [], 0
    for box in boxes:
        piece = flat.narrow(0, begin, math.prod(box.shape))
        parts.append((box, piece.view(box.shape) if box.shape else piece[0]))
        begin += box.numel
    return parts
