"""Views that rearrange dims: view and reshape, permutations, squeeze, unsqueeze, expand.

Every one is linear, so a pending sum stays pending, and maps input dims to output dims, so a shard
of a dim becomes a shard of the dim it maps to. Reshape maps a dim where the blocks of all ranks
are blocks of the result too, whether or not they are of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.call import Call, Localized, Rewrite, Rule, Shape, Strategy, normalize_dim, normalize_dims
from .._dispatch.engine import Handler, keyed_handler, out_variant
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import keyed, register
from .._spec import Spec, spec_of
from .._tensor import TABLE, DTensor
from ..placements import P
from ._blocks import reshape_pairs, reshape_strategies, same_blocks
from .pointwise import broadcast

_run = torch._C._disabled_torch_function_impl
_KEEP_PENDING = Strategy((P,), (P,), exact=True)


def dim_map_rule(
    shape: Shape, pairs: Sequence[tuple[int, int]], localize: Any = None, *, view: bool = True, uniform: bool = False
) -> Rule:
    """Rule of a linear function of one tensor whose input dim d lies along output dim b for (d, b) in `pairs`."""
    strategies = [Strategy((d,), (b,)) for d, b in pairs]
    strategies.append(_KEEP_PENDING)
    return Rule([shape], strategies, localize, view=view, uniform=uniform)


def rewrite(call: Call, function: Any, *tail: Any) -> Localized:
    """Run `function(input, *tail)` on the local part."""
    if call.paths[0] == (0,):
        return Rewrite(function, tail)
    key = call.paths[0][0]
    return lambda _, args, kwargs: function(kwargs[key], *tail)


def sizes_of(values: Sequence[Any]) -> tuple[int, ...]:
    """Sizes given as separate ints or as one sequence."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    return tuple(v if v.__class__ is int else int(v) for v in values)


def copied(view: Handler) -> Handler:
    """Handler of the `name_copy` form of a function that gives a view."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            return out_variant(handler, func, args, kwargs)
        r = view(func, args, kwargs)
        return r.clone() if isinstance(r, Tensor) else tuple(t.clone() for t in r)

    return handler


# ------------------------------------------------------------------ view, reshape, flatten, unflatten


def infer_shape(sizes: Shape, numel: int) -> Shape:
    """Replace a size of -1; raises torch's error where the sizes do not fit `numel` elements."""
    known = math.prod(sizes)
    if -1 in sizes:
        known = -known
        if sizes.count(-1) > 1:
            raise RuntimeError("only one dimension can be inferred")
        if known == 0 and numel == 0:
            raise RuntimeError(
                f"cannot reshape tensor of 0 elements into shape {list(sizes)} because the unspecified dimension size "
                "-1 can be any value"
            )
        if known > 0 and numel % known == 0:
            return tuple(numel // known if n == -1 else n for n in sizes)
    elif known == numel and all(n >= 0 for n in sizes):
        return sizes
    raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {numel}")


def _reshape_rule(call: Call, shape: Shape, function: Any, *, view: bool) -> Rule:
    old = call.shape
    pairs = reshape_pairs(old, shape)

    def condition(dim: int, lengths: tuple[int, int], inner: tuple[int, int]) -> Any:
        return None if inner[0] == inner[1] else same_blocks(call.mesh.sizes, dim, lengths, inner)

    strategies = [Strategy((d,), (b,), when=condition(d, (old[d], shape[b]), (i, j))) for d, b, i, j in pairs]
    strategies += [_KEEP_PENDING, *reshape_strategies(call, shape, pairs, condition)]

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        return rewrite(call, function, outs[0].local_shape)

    return Rule([shape], strategies, localize, view=view, uniform=True)


def view_rule(call: Call) -> Rule:
    """`view(*sizes)`."""
    sizes = (
        sizes_of(call.args[1:])
        if len(call.args) > 1
        else sizes_of(next(v for k, v in call.kwargs.items() if k in ("size", "shape")))
    )
    return _reshape_rule(call, infer_shape(sizes, call.specs[0].numel), Tensor.view, view=True)


def reshape_rule(call: Call) -> Rule:
    """`reshape`: a view where the local part allows one, else a copy."""
    sizes = sizes_of(call.args[1:] if call.paths[0] == (0,) and len(call.args) > 1 else (call.kwargs["shape"],))
    return _reshape_rule(call, infer_shape(sizes, call.specs[0].numel), Tensor.reshape, view=False)


def flatten_rule(call: Call) -> Rule | None:
    """`flatten(start_dim, end_dim)` and `ravel`."""
    start, end = call.arg(1, "start_dim", 0), call.arg(2, "end_dim", -1)
    if not (isinstance(start, int) and isinstance(end, int)) or "out_dim" in call.kwargs or len(call.args) > 3:
        return None  # named tensors
    shape = call.shape
    if not shape:
        return _reshape_rule(call, (1,), Tensor.reshape, view=False)
    first, last = normalize_dim(start, call.ndim), normalize_dim(end, call.ndim)
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    new = (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    return _reshape_rule(call, new, Tensor.reshape, view=False)


def unflatten_rule(call: Call) -> Rule | None:
    """`unflatten(dim, sizes)`."""
    dim, sizes = call.arg(1, "dim"), call.arg(2, "sizes")
    if not isinstance(dim, int):
        return None  # named tensors
    shape, dim = call.shape, normalize_dim(dim, call.ndim)
    inner = infer_shape(sizes_of((sizes,)), shape[dim])
    return _reshape_rule(call, (*shape[:dim], *inner, *shape[dim + 1 :]), Tensor.view, view=True)


keyed("reshape _reshape_alias _unsafe_view", reshape_rule, inplace=False)
keyed("flatten ravel", flatten_rule, inplace=False)
keyed("unflatten", unflatten_rule, inplace=False)


def _view_handler() -> Any:
    sizes_handler = keyed_handler(view_rule, gather_fallback)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("dtype") is not None or (len(args) == 2 and args[1].__class__ is torch.dtype):
            return _view_dtype(func, args, kwargs)
        return sizes_handler(func, args, kwargs)

    handler.cache = sizes_handler.cache  # type: ignore[attr-defined]
    return handler


def _view_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reinterpret the bits. A sharded last dim may not change its size; a pending sum has no bits yet."""
    x, dtype = args[0], kwargs.get("dtype", args[-1])
    spec: Spec = x._spec
    old = x.dtype.itemsize
    if P in spec.types or (old != dtype.itemsize and spec.ndim - 1 in spec.sharded):
        return gather_fallback(func, args, kwargs)
    r = _run(func, (), args, kwargs)
    if old != dtype.itemsize:
        spec = spec_of(spec.mesh, (*spec.shape[:-1], r.shape[-1]), spec.types)
    r.__class__ = DTensor
    r._spec = spec
    return r


for _func in (Tensor.view, torch.ops.aten.view):
    TABLE[_func] = _view_handler()
TABLE[torch.view_copy] = copied(_view_handler())


def _like(method: str) -> Callable[..., Any]:
    """Handler of `x.method(other)`, which needs only the shape of `other`."""
    function = getattr(Tensor, method)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
        return function(x, tuple(other.shape))

    return handler


register("view_as", _like("view"))
register("reshape_as", _like("reshape"))
register("expand_as", _like("expand"))

# ------------------------------------------------------------------ permutations


def permuted_rule(call: Call, order: Sequence[int], localize: Any = None) -> Rule:
    """Rule of a view whose dim b is the input's dim `order[b]`."""
    shape = call.shape
    return dim_map_rule(tuple([shape[d] for d in order]), [(d, b) for b, d in enumerate(order)], localize, uniform=True)


def swapped(ndim: int, dim0: int, dim1: int) -> list[int]:
    """Order of dims with two exchanged."""
    order = list(range(ndim))
    if ndim:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return order


def transpose_rule(call: Call) -> Rule | None:
    """`transpose(dim0, dim1)` and its aliases."""
    dims = [*call.args[1:], *call.kwargs.values()] if call.paths[0] == (0,) else list(call.kwargs.values())[1:]
    if len(dims) != 2 or not all(isinstance(d, int) for d in dims):
        return None
    return permuted_rule(call, swapped(call.ndim, *[normalize_dim(d, call.ndim) for d in dims]))


def permute_rule(call: Call) -> Rule:
    """`permute(*dims)`."""
    given = sizes_of(call.args[1:] if call.paths[0] == (0,) and len(call.args) > 1 else (call.kwargs["dims"],))
    if len(given) != call.ndim:
        raise RuntimeError(
            f"permute(sparse_coo): number of dimensions in the tensor input does not match the length of the "
            f"desired ordering of dimensions i.e. input.dim() = {call.ndim} is not equal to len(dims) = {len(given)}"
        )
    order = normalize_dims(given, call.ndim)
    if len(set(order)) != len(order):
        raise RuntimeError("permute(): duplicate dims are not allowed.")
    return permuted_rule(call, order)


def movedim_rule(call: Call) -> Rule:
    """`movedim(source, destination)`."""
    source = normalize_dims(call.arg(1, "source"), call.ndim)
    destination = normalize_dims(call.arg(2, "destination"), call.ndim)
    if len(source) != len(destination) or len(set(source)) != len(source) or len(set(destination)) != len(destination):
        raise RuntimeError(
            f"movedim: source {source} and destination {destination} must be distinct dims, equally many"
        )
    order = [-1] * call.ndim
    for s, d in zip(source, destination, strict=True):
        order[d] = s
    rest = iter(d for d in range(call.ndim) if d not in source)
    return permuted_rule(call, [d if d >= 0 else next(rest) for d in order])


def reversed_rule(call: Call) -> Rule:
    """`t()` and `.T`."""
    if call.name.startswith("t") and call.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {call.ndim}D")
    return permuted_rule(call, list(reversed(range(call.ndim))))


def matrix_transposed_rule(call: Call) -> Rule:
    """`.mT`, `.mH`, `.H`, `adjoint()`."""
    return permuted_rule(call, swapped(call.ndim, -2, -1) if call.ndim > 1 else list(range(call.ndim)))


keyed("transpose swapaxes swapdims transpose_copy", transpose_rule, inplace=False)
keyed("permute permute_copy", permute_rule, inplace=False)
keyed("movedim moveaxis", movedim_rule, inplace=False)
keyed("t t_copy get:T", reversed_rule, inplace=False)
keyed("adjoint get:mT get:mH get:H", matrix_transposed_rule, inplace=False)

# ------------------------------------------------------------------ squeeze, unsqueeze, expand


def squeezed_dims(shape: Sequence[int], dim: Any) -> tuple[int, ...]:
    """Dims of length 1 that `squeeze(dim)` takes away."""
    return tuple(d for d in normalize_dims(dim, len(shape)) if d < len(shape) and shape[d] == 1)


def squeeze_rule(call: Call) -> Rule:
    """`squeeze()`, `squeeze(dim)`, `squeeze(dims)`: dims are named locally, so that no other local length of 1 goes."""
    gone = squeezed_dims(call.shape, call.arg(1, "dim"))
    kept = [d for d in range(call.ndim) if d not in gone]

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        return rewrite(call, torch.squeeze, gone)

    pairs = [(d, b) for b, d in enumerate(kept)]
    return dim_map_rule(tuple([call.shape[d] for d in kept]), pairs, localize, uniform=True)


def unsqueeze_rule(call: Call) -> Rule:
    """`unsqueeze(dim)`."""
    at = normalize_dim(call.arg(1, "dim"), call.ndim + 1)
    shape = call.shape
    return dim_map_rule((*shape[:at], 1, *shape[at:]), [(d, d + (d >= at)) for d in range(call.ndim)], uniform=True)


def expand_rule(call: Call) -> Rule:
    """`expand(*sizes)` and `broadcast_to`: dims that grow must be whole."""
    given = sizes_of(
        call.args[1:]
        if call.paths[0] == (0,) and len(call.args) > 1
        else (call.kwargs.get("size", call.kwargs.get("shape")),)
    )
    old, new = call.shape, list(given)
    lead = len(new) - len(old)
    if lead < 0:
        raise RuntimeError(
            f"expand({list(old)}, size={new}): the number of sizes provided ({len(new)}) must be greater or equal "
            f"to the number of dimensions in the tensor ({len(old)})"
        )
    pairs = []
    for d, length in enumerate(old):
        if new[lead + d] == -1:
            new[lead + d] = length
        if new[lead + d] == length:
            pairs.append((d, lead + d))
        elif length != 1:
            raise RuntimeError(
                f"The expanded size of the tensor ({new[lead + d]}) must match the existing size ({length}) at "
                f"non-singleton dimension {lead + d}.  Target sizes: {new}.  Tensor sizes: {list(old)}"
            )
    if any(n < 0 for n in new):
        raise RuntimeError(f"expand: sizes {list(given)} are negative where the tensor {list(old)} has no dim")

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        return rewrite(call, Tensor.expand, outs[0].local_shape)

    return dim_map_rule(tuple(new), pairs, localize, uniform=True)


keyed("squeeze", squeeze_rule, inplace=False)
register("squeeze_copy", copied(keyed_handler(squeeze_rule, gather_fallback)))
keyed("unsqueeze unsqueeze_copy", unsqueeze_rule, inplace=False)
keyed("expand broadcast_to", expand_rule, inplace=False)
register("expand_copy", copied(keyed_handler(expand_rule, gather_fallback)))


def _broadcast_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else list(args)
    shape = broadcast([t.shape for t in tensors])
    return tuple(t.expand(shape) for t in tensors)


register("broadcast_tensors", _broadcast_tensors)
