"""From a call to its local execution: caches, and the hot path.

Every function has a *handler* `handler(func, args, kwargs)`. A handler looks up an `Entry` by the
specs of its tensor arguments (and the other arguments where they matter) and executes it. A miss
makes the entry (see `entry`); after that a call costs a dictionary lookup, the local function, and
two attribute assignments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._comm.move import move, watchers
from .._order import keep_order
from .._spec import Spec, replicated
from .._tap import alias, slot
from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from ..placements import AxisTypes
from . import policy
from .call import function_name
from .copies import before_write, mark_copies
from .entry import Entry, NoRule, RuleFunction, miss

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_run = torch._C._disabled_torch_function_impl
_grad_enabled = torch.is_grad_enabled
_num_modes = torch._C._len_torch_function_stack
_stride = Tensor.stride
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_version = Tensor._version.__get__  # type: ignore[attr-defined]
_NOTHING: dict[str, Any] = {}
_LIMIT = 1 << 14
"""Entries per function before its cache is emptied: programs with ever new shapes must not leak."""

checking = os.environ.get("VESCALE_DTENSOR_CHECKS", "") == "1"
"""Whether every local result is compared with its spec (see `debug_checks`)."""


# ------------------------------------------------------------------ execution


def _cast_and_run(e: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on casts of its operands; with dispatch off, which makes looking at tensors cheap."""
    cast = list(args)
    for at, types in e.casts:  # type: ignore[union-attr]
        x = cast[at]
        known = x.__dict__.get("_casts")
        hit = None if known is None else known.get(types)
        if hit is not None and hit[1] == _version(x) and _requires_grad(x):
            cast[at] = hit[0]
        else:
            cast[at] = _moved(x, (), types, e)
    return func(*cast, **kwargs)


def execute(e: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call by its entry and label the results."""
    if e.fast:
        r = _run(func, (), args, kwargs)
    elif e.casts is not None and _grad_enabled() and not (watchers or slot.active or _num_modes()):
        r = _run(_cast_and_run, (), (e, func, args, kwargs), _NOTHING)
    elif e.thin and not kwargs and args[0].__class__ is DTensor and args[0]._spec is e.out:
        r = _run(func, (), args, kwargs)
        if isinstance(r, Tensor) and _run(_stride, (), (args[0],), {}) != _run(_stride, (), (r,), {}):
            r = keep_order(r, args)
    elif e.direct is not None:
        r = _run(e.direct.function, (), (args[0], *e.direct.tail), _NOTHING)
    else:
        return _execute_general(e, func, args, kwargs)
    if r.__class__ is Tensor:
        if checking:
            check(e.name, r, e.out)
        r.__class__ = DTensor
        r._spec = e.out  # type: ignore[attr-defined]
        return r
    return label(r, e)


def _execute_general(e: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if e.plain:
        policy.check_plain(
            e.name,
            next(t.shape for t in tensors_in(args, kwargs) if not isinstance(t, DTensor) and t.numel() != 1),
        )
    if e.implicit is not None and policy.state.communication != "allow":
        policy.report(e.name, e.implicit)
    original: Any = args[0] if args else next(v for v in kwargs.values() if isinstance(v, DTensor))
    if e.inplace:
        before_write(original, e.name)
    if e.moves:
        args, kwargs = apply_moves(e, args, kwargs)
    if e.local is not None:
        r = _run(e.local, (), (func, args, kwargs), {})
    elif e.rewrite is not None:
        r = _run(e.rewrite.function, (), (args[0], *e.rewrite.tail), {})
    else:
        r = _run(func, (), args, kwargs)
    if e.inplace:
        return original
    if e.reorder and isinstance(r, Tensor):
        r = keep_order(r, args, _memory_format(e, args, kwargs))
    if e.view:
        return mark_copies(label(r, e), e.name, original)
    if e.plain and isinstance(r, Tensor) and any(r is a for a in args):
        r = alias(r)  # never label a tensor that the caller passed in
    return label(r, e)


def _memory_format(e: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.memory_format | None:
    """The order in memory that a call asks for."""
    for value in (*kwargs.values(), *args):
        if value.__class__ is torch.memory_format:
            return value
    return torch.contiguous_format if e.name == "contiguous" else None


def apply_moves(e: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the operands that must move."""
    gradients = _grad_enabled()
    new_args, new_kwargs = list(args), kwargs
    for path, types, free in e.moves:
        if free and not gradients:
            continue
        key = path[0]
        if isinstance(key, str):
            if new_kwargs is kwargs:
                new_kwargs = dict(kwargs)
            new_kwargs[key] = _moved(new_kwargs[key], path[1:], types, e)
        else:
            new_args[key] = _moved(new_args[key], path[1:], types, e)
    return tuple(new_args), new_kwargs


def _moved(value: Any, path: tuple[Any, ...], types: AxisTypes, e: Entry) -> Any:
    if path:
        items = list(value)
        items[path[0]] = _moved(items[path[0]], path[1:], types, e)
        return type(value)(items) if type(value) in (list, tuple) else items
    if not isinstance(value, DTensor):
        value = as_replicated(value, e)
    return move(value, types)


def as_replicated(value: Tensor, e: Entry) -> DTensor:
    """Label an alias of a plain tensor as the same on every rank."""
    if value.layout != torch.strided:
        raise UnsupportedOperationError(
            f"{e.name} of a {value.layout} tensor beside a sharded one has no rule; use to_dense() or full_tensor()"
        )
    return tag(alias(value), replicated(e.outs[0].mesh, value.shape))


def tag(r: Tensor, spec: Spec) -> DTensor:
    """Make a fresh plain tensor a DTensor of `spec`, in place."""
    r.__class__ = DTensor
    r._spec = spec  # type: ignore[attr-defined]
    return r  # type: ignore[return-value]


def label(r: Any, e: Entry) -> Any:
    """Give local results, one or many, their specs."""
    outs = [s.invariant for s in e.outs] if e.varying and not _grad_enabled() else e.outs
    if isinstance(r, Tensor):
        return label_one(r, outs[0], e.name)
    if r is None or not outs:
        return r
    it = iter(outs)
    labelled = [label_one(item, next(it), e.name) if isinstance(item, Tensor) else item for item in r]
    if all(a is b for a, b in zip(labelled, r, strict=True)):
        return r  # keeps named tuples such as torch.return_types.max
    return type(r)(labelled)


def label_one(r: Tensor, spec: Spec, name: str = "") -> DTensor:
    """Label one local result; what is labelled otherwise already is aliased."""
    if r.__class__ is Tensor:
        if checking:
            check(name, r, spec)
        r.__class__ = DTensor
        r._spec = spec  # type: ignore[attr-defined]
        return r  # type: ignore[return-value]
    if isinstance(r, DTensor) and r._spec is spec:
        return r
    return tag(alias(r), spec)


def check(name: str, r: Tensor, spec: Spec | None) -> None:
    """Debug mode: compare a local result with its spec."""
    if spec is not None and tuple(r.shape) != spec.local_shape:
        raise AssertionError(
            f"{name}: local result of shape {list(r.shape)}, but {spec!r} on {spec.mesh!r} "
            f"at {spec.mesh.coordinate} holds {list(spec.local_shape)}; please report this sharding rule"
        )


def debug_checks(enabled: bool) -> None:
    """Compare every local result with its spec from now on; for tests of sharding rules.

    The environment variable ``VESCALE_DTENSOR_CHECKS=1`` switches it on at import.
    """
    global checking
    checking = enabled


def tensors_in(args: Any, kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    """All tensors in nested arguments."""
    found: list[Tensor] = []
    stack = [*args, *(kwargs or {}).values()]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    return found


# ------------------------------------------------------------------ handlers


def _key_part(value: Any) -> Any:
    """What of an argument decides the strategy: a spec, a plain tensor's shape, a value; True is not 1."""
    cls = value.__class__
    if cls is DTensor:
        return value._spec
    if cls is tuple or cls is list or cls is torch.Size:
        return (list, *[_key_part(v) for v in value])
    if cls is bool:
        return (bool, value)
    if isinstance(value, Tensor):
        return (Tensor, value.shape)
    if cls is slice:
        return (slice, value.start, value.stop, value.step)
    return value


def remember(cache: dict[Any, Entry], key: Any, e: Entry) -> Entry:
    """Store an entry; a full cache is emptied first."""
    if len(cache) >= _LIMIT:
        cache.clear()
    cache[key] = e
    return e


class Cache(dict[Any, Entry]):
    """Entries of one function; all caches are known, so that `clear_caches` can empty them."""

    all: ClassVar[list[Cache]] = []

    def __init__(self) -> None:
        super().__init__()
        Cache.all.append(self)

    __hash__ = object.__hash__  # type: ignore[assignment]


def clear_caches() -> None:
    """Forget all entries: after rules were registered or a plugin was switched on or off."""
    for cache in Cache.all:
        cache.clear()


def pointwise_handler(rule: RuleFunction, fallback: Handler, *, inplace: bool = False) -> Handler:
    """Make the handler of one function whose strategy depends on the specs alone, not on scalars."""
    cache = Cache()
    find = cache.get

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            if kwargs.get("out") is not None:
                return out_variant(handler, func, args, kwargs)
            key: Any = (*[_spec_part(a) for a in args], *[(k, _spec_part(v)) for k, v in kwargs.items()])
        elif len(args) == 1:
            key = args[0]._spec
        elif len(args) == 2:
            x, y = args
            key = (
                x._spec if x.__class__ is DTensor else x.shape if isinstance(x, Tensor) else None,
                y._spec if y.__class__ is DTensor else y.shape if isinstance(y, Tensor) else None,
            )
        else:
            key = tuple([_spec_part(a) for a in args])
        e = find(key)
        if e is None:
            try:
                e = remember(cache, key, miss(func, args, kwargs, rule, inplace=inplace, elementwise=True))
            except NoRule:
                return fallback(func, args, kwargs)
        if e.fast:
            r = _run(func, (), args, kwargs)
            if r.__class__ is Tensor and not checking:
                r.__class__ = DTensor
                r._spec = e.out  # type: ignore[attr-defined]
                return r
            return label(r, e)
        return execute(e, func, args, kwargs)

    handler.cache = cache  # type: ignore[attr-defined]
    return handler


def _spec_part(value: Any) -> Any:
    if value.__class__ is DTensor:
        return value._spec
    return value.shape if isinstance(value, Tensor) else None


def keyed_handler(rule: RuleFunction, fallback: Handler, *, inplace: bool = False) -> Handler:
    """Make the handler of one function whose strategy depends on all arguments (dims, sizes, indices).

    The quick cache takes the arguments as they are, so it does not serve plain tensors (they hash by
    identity) and lists; these take the full key. In it True is 1, which only indexing tells apart.
    """
    quick, full = Cache(), Cache()
    find = quick.get

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key: Any
        if kwargs:
            key = (
                *[a._spec if a.__class__ is DTensor else a for a in args],
                *[(k, v._spec if v.__class__ is DTensor else v) for k, v in kwargs.items()],
            )
        elif len(args) == 2:
            x, y = args
            key = (x._spec if x.__class__ is DTensor else x, y._spec if y.__class__ is DTensor else y)
        elif len(args) == 3:
            x, y, z = args
            key = (
                x._spec if x.__class__ is DTensor else x,
                y._spec if y.__class__ is DTensor else y,
                z._spec if z.__class__ is DTensor else z,
            )
        else:
            key = tuple([a._spec if a.__class__ is DTensor else a for a in args])
        try:
            e = find(key)
        except TypeError:  # a list among the arguments
            key, e = None, None
        if e is None:
            if kwargs and kwargs.get("out") is not None:
                return out_variant(handler, func, args, kwargs)
            try:
                e = slow(func, args, kwargs)
            except NoRule:
                return fallback(func, args, kwargs)
            if key is not None and _quickly_keyed(args, kwargs):
                remember(quick, key, e)
        if e.fast:
            r = _run(func, (), args, kwargs)
            if r.__class__ is Tensor and not checking:
                r.__class__ = DTensor
                r._spec = e.out  # type: ignore[attr-defined]
                return r
            return label(r, e)
        return execute(e, func, args, kwargs)

    def slow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        key = (*map(_key_part, args), *[(k, _key_part(v)) for k, v in kwargs.items()])
        try:
            e = full.get(key)
        except TypeError:  # an unhashable argument of a kind unknown here: decided anew each time
            return miss(func, args, kwargs, rule, inplace=inplace)
        if e is None:
            e = remember(full, key, miss(func, args, kwargs, rule, inplace=inplace))
        return e

    handler.cache = quick  # type: ignore[attr-defined]
    return handler


def _quickly_keyed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments can be their own key (see `keyed_handler`)."""
    return all(map(_plain_value, args)) and all(map(_plain_value, kwargs.values()))


def _plain_value(value: Any) -> bool:
    if value.__class__ is tuple:
        return all(map(_plain_value, value))
    return value.__class__ is DTensor or not isinstance(value, Tensor)


def out_variant(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle `out=`: compute, then copy into the given tensors, which keep their layout."""
    rest = dict(kwargs)
    out = rest.pop("out")
    if _grad_enabled() and any(t.requires_grad for t in tensors_in((args, out), rest)):
        raise RuntimeError(
            f"{function_name(func)}: functions with out=... arguments don't support automatic differentiation, but one "
            "of the arguments requires grad"
        )
    ours = any(isinstance(t, DTensor) for t in tensors_in(args, rest))
    result = handler(func, args, rest) if ours else func(*args, **rest)
    targets = list(out) if isinstance(out, list | tuple) else [out]
    results = list(result) if isinstance(result, list | tuple) else [result]
    with torch.no_grad():
        for target, value in zip(targets, results, strict=True):
            if isinstance(target, DTensor):
                if not isinstance(value, DTensor):
                    policy.check_plain("out=", tuple(value.shape))
                    value = tag(value, replicated(target._spec.mesh, value.shape))
                if not torch.can_cast(value.dtype, target.dtype):
                    raise RuntimeError(
                        f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
                    )
                if target._spec.shape != value._spec.shape:
                    _run(Tensor.resize_, (), (target, value._spec.local_shape), {})
                    target._spec = value._spec
                target.copy_(value)
            else:
                target.resize_(value.shape) if target.shape != value.shape else None
                target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
    return out
