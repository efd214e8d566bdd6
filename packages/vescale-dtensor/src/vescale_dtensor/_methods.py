"""Tensor methods overridden on `DTensor`: the hottest ones skip the hop through `__torch_function__`.

A call of `x.add(y)` on a subclass goes from Python to C++ and back to Python to find its handler,
which costs more than the rest of the dispatch. These overrides look into the handler's cache at
once. A miss, a torch function mode, or dispatch switched off takes the usual way, so nothing but
speed depends on this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._dispatch import engine
from ._dispatch.engine import execute, label
from ._tensor import TABLE, DTensor

_run = torch._C._disabled_torch_function_impl
_on = torch._C._is_torch_function_enabled
_num_modes = torch._C._len_torch_function_stack
_NOTHING: dict[str, Any] = {}

_UNARY = "relu sigmoid tanh exp log sqrt rsqrt abs neg square contiguous clone __neg__ __invert__"
_BINARY = """
add sub mul div pow maximum minimum eq ne lt le gt ge __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
__truediv__ __rtruediv__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__
"""

_KEYED = """
view reshape transpose permute flatten unsqueeze squeeze sum mean softmax log_softmax chunk split unbind expand
matmul __matmul__ mm bmm to float type_as amax argmax cumsum
"""


def _unary_method(func: Any, find: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: DTensor, **kwargs: Any) -> Any:
        if _on() and not _num_modes() and not kwargs:
            e = find(self._spec)
            if e is not None and e.fast:
                r = _run(func, (), (self,), _NOTHING)
                if r.__class__ is Tensor and not engine.checking:
                    r.__class__ = DTensor
                    r._spec = e.out
                    return r
                return label(r, e)
        return func(self, **kwargs)

    return method


def _binary_method(func: Any, find: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: DTensor, other: Any, **kwargs: Any) -> Any:
        if _on() and not _num_modes() and not kwargs:
            if other.__class__ is DTensor:
                e = find((self._spec, other._spec))
            else:
                e = find((self._spec, other.shape if isinstance(other, Tensor) else None))
            if e is not None:
                if not e.fast:
                    return execute(e, func, (self, other), _NOTHING)
                r = _run(func, (), (self, other), _NOTHING)
                if r.__class__ is Tensor and not engine.checking:
                    r.__class__ = DTensor
                    r._spec = e.out
                    return r
                return label(r, e)
        return func(self, other, **kwargs)

    return method


def _keyed_method(func: Any, find: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and _on() and not _num_modes():
            key = (self._spec, *[a._spec if a.__class__ is DTensor else a for a in args])
            try:
                e = find(key)
            except TypeError:  # a list among the arguments
                e = None
            if e is not None:
                if e.rewrite is not None and not e.moves and not e.plain:
                    r = _run(e.rewrite.function, (), (self, *e.rewrite.tail), kwargs)
                elif e.fast:
                    r = _run(func, (), (self, *args), kwargs)
                else:
                    return execute(e, func, (self, *args), kwargs)
                if r.__class__ is Tensor and not engine.checking:
                    r.__class__ = DTensor
                    r._spec = e.out
                    return r
                return label(r, e)
        return func(self, *args, **kwargs)

    return method


def _install(names: str, make: Callable[[Any, Callable[[Any], Any]], Callable[..., Any]]) -> None:
    for name in names.split():
        func = getattr(Tensor, name)
        cache = getattr(TABLE.get(func), "cache", None)
        if cache is None:
            continue  # no rule is registered for it: nothing to be quick about
        method = make(func, cache.get)
        method.__name__, method.__qualname__, method.__doc__ = name, f"DTensor.{name}", func.__doc__
        setattr(DTensor, name, method)


def install() -> None:
    """Put the overrides on the class; called once, after all rules are registered."""
    _install(_UNARY, _unary_method)
    _install(_BINARY, _binary_method)
    _install(_KEYED, _keyed_method)


__all__ = ["install"]
