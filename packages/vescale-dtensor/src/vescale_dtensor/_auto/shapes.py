"""Results of operators on meta tensors, remembered by the shapes of their arguments.

torch finds the shapes of many operators in Python, at 0.1 ms and more each. A search runs the same operators on the
same shapes hundreds of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """What is to be known of an operator."""

    view: bool
    """Whether a result shares memory with an argument, or it is not known to not do so."""
    changes: int | None
    """Position of the argument that it changes and returns."""
    flops: Callable[[Any, Any], int] | None
    """Floating point operations from arguments and results."""


_kinds: dict[Any, Kind] = {}
_results: dict[Any, Any] = {}
_LIMIT = 1 << 16


def kind_of(func: Any) -> Kind:
    """What is known of an overload."""
    found = _kinds.get(func)
    if found is None:
        found = _kinds[func] = _kind(func)
    return found


def _kind(func: Any) -> Kind:
    schema = func._schema
    flops = _FLOPS.get(func.overloadpacket)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    aliased = [r for r in schema.returns if r.alias_info is not None]
    if written == [0] and len(schema.returns) == 1 and len(aliased) == 1:
        return Kind(False, 0, flops)
    return Kind(bool(written or aliased or func.is_view), None, flops)


def results(func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
    """What the operator returns on meta tensors: new tensors without data, or the argument that it changes."""
    if kind.changes is not None:
        return args[0]
    try:
        key = (func, _key(args), *((k, _key(v)) for k, v in kwargs.items()))
        found = _results.get(key)
    except TypeError:  # an argument that cannot be remembered
        return func(*args, **kwargs)
    if found is None:
        out = func(*args, **kwargs)
        if len(_results) >= _LIMIT:
            _results.clear()
        _results[key] = _described(out)
        return out
    return _made(found)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple([_key(v) for v in value])
    return value.__class__, value


_PLAIN = object()


def _described(out: Any) -> Any:
    if isinstance(out, Tensor):
        return (out.shape, out.stride(), out.dtype, out.device)
    if isinstance(out, tuple | list):
        return [_described(v) for v in out]
    return (_PLAIN, out)


def _made(described: Any) -> Any:
    if isinstance(described, list):
        return tuple([_made(d) for d in described])
    if described[0] is _PLAIN:
        return described[1]
    shape, stride, dtype, device = described
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _product(x: int, y: int) -> Callable[[Any, Any], int]:
    """Formula of a matrix product of the arguments `x` and `y`."""
    return lambda args, out: 2 * math.prod(args[x].shape) * int(args[y].shape[-1])


def _convolution(args: Any, out: Any) -> int:
    return int(2 * out.numel() * math.prod(args[1].shape[1:]))


def _convolution_backward(args: Any, out: Any) -> int:
    return int(2 * args[0].numel() * math.prod(args[2].shape[1:]) * sum(g is not None for g in out[:2]))


def _attention(times: int, first: int) -> Callable[[Any, Any], int]:
    """Formula of attention with query and key at `first` and after it: so many products of scores."""
    return lambda args, out: 2 * times * math.prod(args[first].shape) * int(args[first + 1].shape[-2])


_aten = torch.ops.aten
_FLOPS: dict[Any, Callable[[Any, Any], int]] = {
    _aten.mm: _product(0, 1), _aten.bmm: _product(0, 1), _aten.addmm: _product(1, 2), _aten.baddbmm: _product(1, 2),
    _aten._grouped_mm: _product(0, 1), _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1),
}  # fmt: skip
