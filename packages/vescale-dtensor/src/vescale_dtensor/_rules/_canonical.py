"""Handlers for functions with many spellings of the same arguments.

A *signature* turns the arguments of a call into one canonical tuple `(tensor, parameters...)`. The
cache key is that tuple with the tensors' specs, so that `x.sum(-1)`, `torch.sum(x, dim=(-1,))` and
`torch.sum(input=x, axis=-1)` take the same short path, keywords included. The rule sees the
canonical arguments, and what `localize` returns is run with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch import engine
from .._dispatch.call import Rewrite, Shape, normalize_dims
from .._dispatch.engine import Cache, Handler, execute, label, out_variant, remember
from .._dispatch.entry import Entry, NoRule, RuleFunction, miss
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._irregular import cut_dims_of
from .._spec import Spec
from .._tensor import DTensor

Signature = Callable[..., tuple[Any, ...]]

_run = torch._C._disabled_torch_function_impl
_NOTHING: dict[str, Any] = {}
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input", "A": "input"}


def unary(names: str, signature: Signature, rule: RuleFunction, *, quick: bool = True) -> Handler:
    """Register functions of one tensor; the rule must localize to a `Rewrite` or a local function.

    Args:
        names: see `register`.
        signature: of the functions.
        rule: of the canonical call.
        quick: arguments may be looked up as they are; not where True and 1 mean different things.
    """
    as_given: dict[Any, Entry] = Cache()
    cache: dict[Any, Entry] = Cache()

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            short = (args[0]._spec, *args[1:], *kwargs.items()) if quick and args else None
            e = as_given.get(short)
        except (TypeError, AttributeError):  # a list of dims; a plain tensor whose result goes into a DTensor
            e, short = None, None
        if e is not None:
            direct = e.direct
            if direct is None or engine.checking:
                return execute(e, func, args, _NOTHING)
            r = _run(direct.function, (), (args[0], *direct.tail), _NOTHING)
            if r.__class__ is Tensor:
                r.__class__ = DTensor
                r._spec = e.out  # type: ignore[attr-defined]
                return r
            return label(r, e)
        if kwargs and kwargs.get("out") is not None:
            return out_variant(handler, func, args, kwargs)
        try:
            canonical = signature(*args, **renamed(kwargs))
            key = (canonical[0]._spec, *canonical[1:])
            e = cache.get(key)
        except (TypeError, AttributeError):  # arguments that only torch can judge
            return gather_fallback(func, args, kwargs)
        if e is None:
            try:
                e = remember(cache, key, miss(func, canonical, {}, rule))
            except NoRule:
                return gather_fallback(func, args, kwargs)
        if short is not None:
            remember(as_given, short, e)
        return execute(e, func, canonical, _NOTHING)

    handler.cache = as_given  # type: ignore[attr-defined]
    register(names, handler)
    return handler


def several(names: str, signature: Signature, rule: RuleFunction, function: Any) -> Handler:
    """Register functions of several tensors; `function` runs on the canonical arguments, all by position."""
    cache: dict[Any, Entry] = Cache()

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return out_variant(handler, func, args, kwargs)
        try:
            canonical = signature(*args, **kwargs)
            key = tuple(
                [v._spec if v.__class__ is DTensor else v.shape if isinstance(v, Tensor) else v for v in canonical]
            )
            e = cache.get(key)
        except TypeError:
            return gather_fallback(func, args, kwargs)
        if e is None:
            try:
                e = remember(cache, key, miss(func, canonical, {}, rule))
            except NoRule:
                return gather_fallback(func, args, kwargs)
        return execute(e, function, canonical, {})

    register(names, handler)
    return handler


def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords without `out`, numpy's names and others replaced by the canonical ones."""
    return {_ALIASES.get(k, k): v for k, v in kwargs.items() if k != "out"} if kwargs else kwargs


def hashable(value: Any) -> Any:
    """Lists as tuples, all else as it is."""
    return tuple(value) if value.__class__ is list else value


def rewrite(function: Any, *tail: Any, **kwargs: Any) -> Rewrite:
    """`Rewrite` to `function(x, *tail, **kwargs)`; keywords that are None are left out."""
    given = {k: v for k, v in kwargs.items() if v is not None}
    return Rewrite(partial(function, **given) if given else function, tail)


class Reduced:
    """Shape and dims of a reduction of `shape` over `dims`."""

    __slots__ = ("dims", "full", "keepdim", "kept", "ndim", "out", "shape")

    def __init__(self, shape: Sequence[int], dim: Any, *, keepdim: bool, empty_is_all: bool = True) -> None:
        if keepdim.__class__ is not bool:
            raise NoRule
        self.ndim, self.shape, self.keepdim = len(shape), tuple(shape), keepdim
        if dim == () and empty_is_all:
            dim = None
        self.dims: tuple[int, ...] = normalize_dims(dim, self.ndim)
        if len(set(self.dims)) != len(self.dims) or dim == ():
            raise NoRule  # torch's own error, or its own idea of reducing over nothing
        self.full = dim is None
        self.kept = tuple(d for d in range(self.ndim) if d not in self.dims)
        self.out: Shape = (
            tuple(1 if d in self.dims else n for d, n in enumerate(shape))
            if keepdim
            else tuple(shape[d] for d in self.kept)
        )

    @property
    def count(self) -> int:
        """Number of elements that one result element is made of."""
        n = 1
        for d in self.dims:
            n *= self.shape[d] if self.ndim else 1
        return n

    def place(self, dim: int) -> int:
        """Dim of the result that a kept dim becomes."""
        return dim if self.keepdim else self.kept.index(dim)

    def axes(self, spec: Spec) -> tuple[int, ...]:
        """Mesh axes of more than one rank that cut the reduced dims."""
        cut = [a for a, t in enumerate(spec.types) if not set(self.dims).isdisjoint(cut_dims_of(t))]
        return tuple(a for a in cut if spec.mesh.sizes[a] > 1)

    def tail(self) -> tuple[Any, ...]:
        """Positional `dim, keepdim` for torch; nothing for a full reduction."""
        return () if self.full and not self.keepdim else (self.dims, self.keepdim)
