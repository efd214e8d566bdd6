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
                    r._spec = e.out  # type: ignore[attr-defined]
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
                    r._spec = e.out  # type: ignore[attr-defined]
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
                if e.direct is not None:
                    r = _run(e.direct.function, (), (self, *e.direct.tail), _NOTHING)
                elif e.fast:
                    r = _run(func, (), (self, *args), kwargs)
                else:
                    return execute(e, func, (self, *args), kwargs)
                if r.__class__ is Tensor and not engine.checking:
                    r.__class__ = DTensor
                    r._spec = e.out  # type: ignore[attr-defined]
                    return r
                return label(r, e)
        return func(self, *args, **kwargs)

    return method


def _getitem_method(handler: Callable[..., Any]) -> Callable[..., Any]:
    func = Tensor.__getitem__

    def __getitem__(self: DTensor, index: Any) -> Any:
        if _on() and not _num_modes():
            return handler(func, (self, index), _NOTHING)
        return func(self, index)

    return __getitem__


def _backward_method(handler: Callable[..., Any]) -> Callable[..., None]:
    func: Any = Tensor.backward

    def backward(
        self: DTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        simple = gradient is None and retain_graph is None and not create_graph and inputs is None
        if simple and _on() and not _num_modes():
            handler(func, (self,), _NOTHING)
        else:
            func(self, gradient, retain_graph, create_graph, inputs)

    backward.__doc__ = func.__doc__
    return backward


def _grad_property() -> property:
    """`grad`, which every step reads and drops for every parameter."""
    attribute: Any = Tensor.grad
    read, write = attribute.__get__, attribute.__set__
    read_handler, write_handler = TABLE[read], TABLE[write]

    def get(self: DTensor) -> Any:
        return read_handler(read, (self,), _NOTHING) if _on() and not _num_modes() else read(self)

    def set_(self: DTensor, value: Any) -> None:
        if not _on() or _num_modes():
            write(self, value)
        elif value is None:
            _run(write, (), (self, None), _NOTHING)
        else:
            write_handler(write, (self, value), _NOTHING)

    def delete(self: DTensor) -> None:
        set_(self, None)

    return property(get, set_, delete, attribute.__doc__)


def _install_attributes() -> None:
    """`dtype`, `device` and `requires_grad`: a getter through `__torch_function__` costs twice as much."""
    for name in ("dtype", "device", "requires_grad"):
        attribute = getattr(Tensor, name)
        setattr(DTensor, name, property(*_accessors(attribute.__get__, attribute.__set__), doc=attribute.__doc__))


def _accessors(read: Any, write: Any) -> tuple[Callable[[DTensor], Any], Callable[[DTensor, Any], None]]:
    def get(self: DTensor) -> Any:
        return read(self) if _num_modes() else _run(read, (), (self,), _NOTHING)

    def set_(self: DTensor, value: Any) -> None:
        write(self, value)

    return get, set_


def _dispatched(name: str, args: tuple[Any, ...]) -> Any:
    """The function that torch hands to `__torch_function__` when method `name` is called: `add` for `__add__`."""
    seen: list[Any] = []

    class Probe(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, len(args), bool(kwargs)))
            return args[0]

    probe = torch.ones(2, 2, dtype=torch.bool).as_subclass(Probe)
    getattr(Tensor, name)(probe, *args)
    func, num_args, has_kwargs = seen[0]
    return func if num_args == 1 + len(args) and not has_kwargs else None


def _install(names: str, make: Callable[[Any, Callable[[Any], Any]], Callable[..., Any]], *args: Any) -> None:
    for name in names.split():
        func = _dispatched(name, args) if args or make is _unary_method else getattr(Tensor, name)
        cache = getattr(TABLE.get(func), "cache", None)
        if cache is None:
            continue  # no rule is registered for it: nothing to be quick about
        method = make(func, cache.get)
        method.__name__, method.__qualname__, method.__doc__ = name, f"DTensor.{name}", func.__doc__
        setattr(DTensor, name, method)


def install() -> None:
    """Put the overrides on the class; called once, after all rules are registered."""
    _install(_UNARY, _unary_method)
    _install(_BINARY, _binary_method, torch.ones(2, 2, dtype=torch.bool))
    _install(_KEYED, _keyed_method)
    DTensor.__getitem__ = _getitem_method(TABLE[Tensor.__getitem__])  # type: ignore[method-assign]
    DTensor.backward = _backward_method(TABLE[Tensor.backward])  # type: ignore[method-assign]
    DTensor.grad = _grad_property()  # type: ignore[assignment]
    _install_attributes()


__all__ = ["install"]
