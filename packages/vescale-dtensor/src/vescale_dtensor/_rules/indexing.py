"""`x[index]` and `x[index] = value`.

An index is done in two steps, as torch does it: ints, slices and None first, which give a view,
then tensors. Dims that the index leaves whole keep their shards; ranges of sharded dims are
windows (`_windows`); positions in a tensor may be sharded themselves where the indexed dim is whole.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._comm.move import move
from .._dispatch import policy
from .._dispatch.call import Rewrite
from .._dispatch.copies import before_write, mark_copies
from .._dispatch.engine import Cache, execute, label_one, remember
from .._dispatch.entry import Entry, miss
from .._dispatch.fallback import write_back
from .._dispatch.table import register
from .._spec import Spec, replicated
from .._tap import alias
from .._tensor import TABLE, DTensor
from ..errors import UnsupportedOperationError
from ._assignment import Assignment, as_tensor
from ._index import Part, as_index, cut_dims, is_full, layout_of, parse, replicated_indices
from ._windows import Window
from .scatter import index_rule
from .views import copied, dim_map_rule

_run = torch._C._disabled_torch_function_impl
_getitem = Tensor.__getitem__
_setitem = Tensor.__setitem__
_cache: dict[Any, Any] = Cache()


_find = _cache.get
_SIMPLE = frozenset((int, type(None), type(Ellipsis)))


def _key_of(spec: Spec, index: Any) -> tuple[Any, ...] | None:
    """Key of an index of ints, slices, None and Ellipsis: types are compared, because True is no 1 here."""
    if index.__class__ is not tuple:
        index = (index,)
    key: list[Any] = [spec]
    for i in index:
        cls = i.__class__
        if cls is slice:
            key.append((slice, i.start, i.stop, i.step))
        elif cls in _SIMPLE:
            key.append(i)
        else:
            return None
    return tuple(key)


def _lasting(key: tuple[Any, ...]) -> bool:
    """Whether a key holds numbers only: a slice may be given tensors, whose values may change."""
    return all(v is None or v.__class__ is int for k in key[1:] if k.__class__ is tuple for v in k[1:])


def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[index]`."""
    x, index = args
    if x.__class__ is not DTensor:
        return _index_plain(x, index)
    key = _key_of(x._spec, index)
    if key is None:
        return _general(x, index)
    e = _find(key)
    if e is None:
        e = _basic(x, index, parse(index, x._spec.shape, x._spec.mesh))
        if _lasting(key):
            remember(_cache, key, e)
    return execute(e, func, args, kwargs) if e.__class__ is Entry else e(x)


def _index_plain(x: Tensor, index: Any) -> Any:
    mesh = next(i._spec.mesh for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, DTensor))
    policy.check_plain("__getitem__", tuple(x.shape))
    return getitem(_getitem, (label_one(alias(x), replicated(mesh, x.shape)), index), {})


class _Windowed:
    """Entry of an index that cuts sharded dims: take the window, then index what is left."""

    __slots__ = ("rest", "window")

    def __init__(self, spec: Spec, parts: list[Part], cut: set[int]) -> None:
        self.window = Window(spec, {p.dim: p.value for p in parts if p.kind == "range" and p.dim in cut})
        self.rest = tuple(as_index(p, taken=p.dim in cut) for p in parts)

    def __call__(self, x: DTensor) -> Any:
        y = self.window(x, "__getitem__")
        if all(i == slice(None) for i in self.rest):
            return y
        r = getitem(_getitem, (y, self.rest), {})
        return mark_copies(r, "__getitem__", x) if self.window.moves else r


def _basic(x: DTensor, index: Any, parts: list[Part]) -> Any:
    """Entry of an index of ints, slices and None."""
    spec = x._spec
    cut = cut_dims(parts, spec)
    if cut and not spec.irregular:
        return _Windowed(spec, parts, cut)
    shape, pairs = layout_of(parts)
    full = [
        (d, b)
        for d, b in pairs
        if shape[b] == spec.shape[d]
        and is_full(next(p.value for p in parts if p.kind == "range" and p.dim == d), spec.shape[d])
    ]
    localize: Any = None
    if spec.irregular:  # a ragged part may be longer than the dim whose place it takes, which `:n` would cut off
        local = tuple(slice(None) if p.dim in dict(full) and p.kind == "range" else as_index(p) for p in parts)

        def localize(ins: list[Spec], outs: list[Spec]) -> Rewrite:
            return Rewrite(_getitem, (local,))

    return miss(_getitem, (x, index), {}, lambda call: dim_map_rule(tuple(shape), full, localize, uniform=True))


def _general(x: DTensor, index: Any) -> Any:
    """An index with bools or tensors: ints, slices and None first, the rest by position."""
    parts = parse(index, x._spec.shape, x._spec.mesh)
    y, tensors = _split(x, parts)
    return y if tensors is None else take(y, tensors)


def _split(x: DTensor, parts: list[Part]) -> tuple[Any, tuple[Any, ...] | None]:
    """View by the parts that are no tensors, and the index that is left for it."""
    first: list[Any] = []
    left: list[Any] = []
    for p in parts:
        if p.kind == "range":
            first.append(as_index(p))
            left += [] if p.value.single else [slice(None)]
        elif p.kind == "new":
            first.append(None)
            left.append(slice(None))
        elif p.kind == "bool":
            first.append(None)
            where = torch.zeros(int(p.value), dtype=torch.int64, device=x._spec.mesh.device_type)
            left.append(label_one(where, replicated(x._spec.mesh, where.shape)))
        elif p.kind == "tensor":
            first.append(slice(None))
            left.append(p.value)
        else:
            first += [slice(None)] * p.value.ndim
            left += replicated_indices(p.value)
    if all(isinstance(i, slice) for i in left):
        return getitem(_getitem, (x, tuple(first)), {}), None
    if not _no_op(first, x):
        x = getitem(_getitem, (x, tuple(first)), {})
    while isinstance(left[-1], slice):
        left.pop()
    return x, tuple(left)


def _no_op(index: list[Any], x: DTensor) -> bool:
    return len(index) <= x._spec.ndim and all(  # longer ones add dims at the end
        isinstance(i, slice) and (i == slice(None) or (i.start == 0 and i.step == 1 and i.stop == n))
        for i, n in zip(index, x._spec.shape, strict=False)
    )


_take_cache: dict[Any, Any] = Cache()


def take(x: DTensor, index: tuple[Any, ...]) -> Any:
    """`x[index]` where every part is a full slice or a labelled tensor of positions."""
    spec = x._spec  # the dtype decides whether parts read from blocks may be summed
    key = (spec, x.dtype if spec.sharded else None, *[i._spec if i.__class__ is DTensor else None for i in index])
    e = _take_cache.get(key)
    if e is None:
        e = remember(_take_cache, key, miss(_getitem, (x, index), {}, index_rule))
    return execute(e, _getitem, (x, index), {})


# ------------------------------------------------------------------ assignment

_assignments: dict[Any, Any] = Cache()


def setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = value`."""
    x, index, value = args
    if x.__class__ is not DTensor:
        raise UnsupportedOperationError(
            f"x[index] = value with a DTensor as index or value would write into a plain tensor of shape "
            f"{list(x.shape)}; distribute the plain tensor first"
        )
    before_write(x, "x[index] = value")
    spec: Spec = x._spec
    if isinstance(value, Tensor) and value.__class__ is not DTensor:
        if value.numel() != 1:
            policy.check_plain("x[index] = value", tuple(value.shape))
        value = label_one(alias(value), replicated(spec.mesh, value.shape))
    if spec.irregular:
        _assign_whole(x, index, value)
        return
    key = _key_of(spec, index)
    assign = None if key is None else _assignments.get(key)
    if assign is None:
        parts = parse(index, spec.shape, spec.mesh)
        if any(p.kind not in ("range", "new") for p in parts):
            _assign_by_tensors(x, parts, value)
            return
        assign = Assignment(spec, parts)
        if key is not None and _lasting(key):
            remember(_assignments, key, assign)  # type: ignore[arg-type]
    assign(x, value)


def _assign_by_tensors(x: DTensor, parts: list[Part], value: Any) -> None:
    masks = [p for p in parts if p.kind == "mask"]
    number = not isinstance(value, Tensor) or (value.numel() == 1 and value.ndim == 0)
    whole = all(p.kind == "mask" or (p.kind == "range" and is_full(p.value, x._spec.shape[p.dim])) for p in parts)
    if number and whole and len(masks) == 1 and masks[0].value.dtype == torch.bool:
        mask, after = masks[0].value, x.ndim - masks[0].dim - masks[0].value.ndim
        x.masked_fill_(mask.reshape((*mask.shape, *(1,) * after)), value)
        return
    if cut_dims(parts, x._spec):
        _assign_gathered(x, parts, value)
        return
    view, index = _split(x, parts)
    assert index is not None
    _put(view, index, as_tensor(x, value))


def _put(x: DTensor, index: tuple[Any, ...], value: DTensor) -> None:
    """`x[index] = value` for an index of full slices and tensors."""
    indices = [None if isinstance(i, slice) else i for i in index]
    torch.ops.aten.index_put_.default(x, indices, _fit_block(value, x, index))


def _fit_block(value: DTensor, x: DTensor, index: tuple[Any, ...]) -> DTensor:
    tensors = [i for i in index if not isinstance(i, slice)]
    ndim = x.ndim - len(tensors) + max(t.ndim for t in tensors)
    while value.ndim > ndim and value.shape[0] == 1:
        value = cast(DTensor, value.squeeze(0))
    return value


def _assign_gathered(x: DTensor, parts: list[Part], value: Any) -> None:
    """Assign in a replicated copy and copy it back: where tensors index what a range cut out of a sharded dim."""
    whole = replicated(x._spec.mesh, x._spec.shape).types
    if policy.state.communication != "allow":
        policy.report("x[index] = value", [(x._spec, whole)])
    copy = cast(DTensor, move(x, whole).clone())
    view, index = _split(copy, parts)
    assert index is not None
    _put(view, index, as_tensor(x, value))
    write_back(x, copy)


def _assign_whole(x: DTensor, index: Any, value: Any) -> None:
    """Assign in a replicated copy and copy it back: where the local part is not one block."""
    whole = replicated(x._spec.mesh, x._spec.shape).types
    if policy.state.communication != "allow":
        policy.report("x[index] = value", [(x._spec, whole)])
    copy = cast(DTensor, move(x, whole).clone())
    setitem(_setitem, (copy, index, value), {})
    write_back(x, copy)


# ------------------------------------------------------------------ narrow, select, slice


def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`narrow(dim, start, length)`."""
    bound = dict(zip(("input", "dim", "start", "length"), args, strict=False)) | {
        k: v for k, v in kwargs.items() if k != "self"
    }
    x, dim, start, length = bound["input"], bound["dim"], bound["start"], bound["length"]
    n = x.shape[dim]
    if isinstance(start, Tensor):
        start = parse(start, (n + 1,), x._spec.mesh)[0].value.start
    if not -n <= start <= n:
        raise IndexError(f"start out of range (expected to be in range of [-{n}, {n}], but got {start})")
    start = start + n if start < 0 else start
    if length < 0 or start + length > n:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({n}).")
    return getitem(_getitem, (x, (slice(None),) * (dim % x.ndim) + (slice(start, start + length),)), {})


def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`select(dim, index)`."""
    bound = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    x, dim, index = bound["input"], bound["dim"], bound["index"]
    if not x.ndim:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    x.shape[dim]  # raises for a dim that does not exist
    return getitem(_getitem, (x, (slice(None),) * (dim % x.ndim) + (index,)), {})


def aten_slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`aten.slice(x, dim, start, end, step)`."""
    bound = dict(zip(("self", "dim", "start", "end", "step"), args, strict=False)) | kwargs
    x, dim = bound["self"], bound.get("dim", 0)
    s = slice(bound.get("start"), bound.get("end"), bound.get("step", 1))
    return getitem(_getitem, (x, (slice(None),) * (dim % x.ndim) + (s,)), {})


def aten_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`aten.index(x, indices)`."""
    return getitem(_getitem, (args[0], tuple(slice(None) if i is None else i for i in args[1])), {})


TABLE[_getitem] = getitem
TABLE[_setitem] = setitem
register("narrow", narrow)
register("narrow_copy", copied(narrow))
register("select", select)
register("select_copy", copied(select))
TABLE[torch.ops.aten.slice] = aten_slice
TABLE[torch.slice_copy] = copied(aten_slice)
TABLE[torch.ops.aten.index] = aten_index
