"""In-place functions that change the shape of a tensor: they change its spec too.

`transpose_`, `squeeze_` and the like rearrange dims. `resize_`, `as_strided`, `set_` see memory, of
which a sharded tensor has only a part: they are refused unless every rank holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._comm.move import forget_casts
from .._dispatch.call import function_name, normalize_dim
from .._dispatch.copies import before_write
from .._dispatch.engine import label_one
from .._dispatch.table import register
from .._spec import Spec, spec_of
from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from .copying import set_data
from .views import squeezed_dims, swapped

_run = torch._C._disabled_torch_function_impl
Dims = list[int | None]
"""For every dim of the result the dim of the input, None for a new one of length 1."""


def _in_place(
    dims_of: Callable[[Spec, tuple[Any, ...]], Dims], local: Callable[[Spec, tuple[Any, ...]], tuple[Any, ...]]
) -> Any:
    """Handler of an in-place function that rearranges dims.

    Args:
        dims_of: the new order of dims, given spec and arguments.
        local: the arguments for the local part.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        rest = (*args[1:], *kwargs.values())
        before_write(x, function_name(func))
        spec: Spec = x._spec
        if spec.irregular:
            raise UnsupportedOperationError(
                f"{function_name(func)} rearranges the dims of {spec!r} in place, which is not cut in blocks; use its "
                "out-of-place form, or redistribute it to Shard(dim) or Replicate() first"
            )
        dims = dims_of(spec, rest)
        lost = spec.sharded - {d for d in dims if d is not None}
        if lost:
            raise UnsupportedOperationError(
                f"{function_name(func)} would remove dim {min(lost)} of {spec!r}, which is sharded; "
                "redistribute it to Replicate() first"
            )
        _run(func, (), (x, *local(spec, rest)), {})
        place = {d: i for i, d in enumerate(dims)}
        shape = [1 if d is None else spec.shape[d] for d in dims]
        forget_casts(x)
        x._spec = spec_of(spec.mesh, shape, tuple(place[t] if t >= 0 else t for t in spec.types))
        return x

    return handler


def _transposed(spec: Spec, rest: tuple[Any, ...]) -> Dims:
    dims = rest or tuple(range(spec.ndim))[-2:]
    return (
        list(swapped(spec.ndim, *[normalize_dim(d, spec.ndim) for d in dims]))
        if len(dims) == 2
        else list(range(spec.ndim))
    )


def _squeezed(spec: Spec, rest: tuple[Any, ...]) -> Dims:
    gone = squeezed_dims(spec.shape, rest[0] if rest else None)
    return [d for d in range(spec.ndim) if d not in gone]


def _unsqueezed(spec: Spec, rest: tuple[Any, ...]) -> Dims:
    at = normalize_dim(rest[0], spec.ndim + 1)
    dims: Dims = list(range(spec.ndim))
    return [*dims[:at], None, *dims[at:]]


def _same(spec: Spec, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return rest


def _named(spec: Spec, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return (squeezed_dims(spec.shape, rest[0] if rest else None),)


register("transpose_ swapaxes_ swapdims_ t_", _in_place(_transposed, _same))
register("squeeze_", _in_place(_squeezed, _named))
register("unsqueeze_", _in_place(_unsqueezed, _same))


def _whole(func: Any, x: Any) -> Spec:
    """Spec of `x`, after making sure that this rank holds all of it."""
    if not isinstance(x, DTensor):
        raise UnsupportedOperationError(
            f"{function_name(func)} would let a plain tensor share a DTensor's memory; pass to_local() of it"
        )
    if x._spec.sharded:
        raise UnsupportedOperationError(
            f"{function_name(func)} works on memory, of which each rank holds only a part of {x._spec!r} on "
            f"{x._spec.mesh!r}; redistribute it to Replicate() first, or use view, reshape or indexing"
        )
    return x._spec


def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`as_strided` of a tensor that every rank holds in full."""
    spec = _whole(func, args[0] if args else kwargs["input"])
    r = _run(func, (), args, kwargs)
    return label_one(r, spec_of(spec.mesh, r.shape, spec.types))


def resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_`, `as_strided_` of a tensor that every rank holds in full."""
    x = args[0]
    spec = _whole(func, x)
    before_write(x, function_name(func))
    rest = tuple(torch.Size(a._spec.shape) if isinstance(a, DTensor) else a for a in args[1:])
    if function_name(func).startswith("resize_as"):
        func, rest = Tensor.resize_, (torch.Size(args[1].shape),)
    _run(func, (), (x, *rest), kwargs)
    forget_casts(x)
    x._spec = spec_of(spec.mesh, _run(Tensor.size, (), (x,), {}), spec.types)
    return x


def set_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.set_(y)`: `x` takes the memory of `y`, and with it the layout. Offsets and sizes in memory are refused."""
    x, *rest = args
    if not isinstance(x, DTensor) or len(rest) != 1 or not isinstance(rest[0], DTensor) or kwargs:
        raise UnsupportedOperationError(
            f"{function_name(func)} would exchange the memory of a tensor without regard to placements; "
            "assign with copy_, or `x.data = value`"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("set_ changes a tensor that requires grad in place; call it under torch.no_grad()")
    set_data(func, (x, rest[0]), {})
    return x


register("as_strided as_strided_copy", as_strided)
register("resize_ resize_as_ as_strided_", resize)
register("set_", set_)
