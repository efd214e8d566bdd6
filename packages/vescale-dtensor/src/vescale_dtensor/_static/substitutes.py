"""How functions that communicate or draw enter a graph: each as an opaque step, or with one inside.

Steps of plans are replaced where they send data, so that packing, slicing and adding around them are compiled. What
sends data in a way that is not in this table is refused, and so is what draws in a way that is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._comm import irregular, move, record, steps
from .._comm.batch import all_reduce_batch
from .._dispatch.call import function_name
from .._patching import replace_once
from .._random import fill, keep_mask
from .._rules import _ring, _windows
from ..errors import DTensorError
from .moves import cast, shift
from .ops import Steps, here, like, opaque, trace
from .recorder import plain, tensors_of

__all__ = ["NoDraws", "substitute", "tracing"]

_DRAWS = frozenset("rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal".split())
"""Functions of plain tensors that return random numbers."""
_DROPS = frozenset("dropout feature_dropout".split())
"""Functions that multiply by random numbers."""
_FILLS = frozenset("uniform_ normal_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_".split())
"""Functions that overwrite a plain tensor with random numbers."""


# ------------------------------------------------------------------ functions that a program calls


def substitute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a function of a program while that is traced; mostly the function itself."""
    if function in _OWN:
        return _OWN[function]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, steps.ReduceExtremum):
        return functools.partial(_extremum, steps.ReduceExtremum.run, owner)
    name = function_name(function)
    if name in _DRAWS:
        return functools.partial(_draw, function)
    if name in _DROPS:
        return functools.partial(_drop, function)
    if name in _FILLS:
        return functools.partial(_overwrite, function)
    return function


def _fill(
    op: str, local: Tensor, spec: Any, args: tuple[Any, ...] = (), kwargs: Any = None, *, contiguous: bool = False
) -> Tensor:
    outline = like(local)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        values, named = _with_tensors((args, kwargs or {}), tensors)
        return [fill(op, outline.empty(), spec, values, named, contiguous=contiguous)]

    inputs = [t.detach() for t in tensors_of((args, kwargs or {}))]
    return local.copy_(opaque(op, run, inputs, [outline])[0])


def _keep_mask(noise: Tensor, spec: Any, p: float) -> Tensor:
    outline = like(noise)
    return noise.copy_(opaque("keep_mask", lambda _: [keep_mask(outline.empty(), spec, p)], [], [outline])[0])


def _batch(tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
    def run(given: list[Tensor]) -> list[Tensor]:
        return [t.clone() for t in all_reduce_batch(given, *args)]

    return opaque("all_reduce_batch", run, tensors, [like(t, t.shape) for t in tensors])


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)  # what traces is of a class of its own, and must stay so


_OWN: dict[Any, Callable[..., Any]] = {
    cast: shift, plain: _alias, fill: _fill, keep_mask: _keep_mask, all_reduce_batch: _batch,
}  # fmt: skip


def _draw(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inputs = tensors_of((args, kwargs))
    if function_name(function).endswith("_like"):
        inputs = [t.detach() for t in inputs]
    if "out" in kwargs or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return function(*args, **kwargs)  # which `NoDraws` refuses
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), FakeTensorMode():
        empty = [like(t).empty() for t in inputs]
        values, named = _with_tensors((args, kwargs), empty)
        outline = like(function(*values, **named))

    def run(tensors: list[Tensor]) -> list[Tensor]:
        values, named = _with_tensors((args, kwargs), tensors)
        return [function(*values, **named)]

    return opaque(function_name(function), run, inputs, [outline])[0]


def _drop(
    function: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Multiply by what is left of ones."""
    if not training or p == 0 or input.numel() == 0:
        unchanged: Tensor = function(input, p, training, inplace)
        return unchanged
    outline = like(torch.empty_like(input))
    (kept,) = opaque("dropout", lambda _: [function(outline.empty().fill_(1), p, True)], [], [outline])
    dropped: Tensor = input.mul_(kept) if inplace else input * kept
    return dropped


def _overwrite(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    outline = like(x)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        values, named = _with_tensors((args, kwargs), tensors)
        return [function(outline.empty(), *values, **named)]

    return x.copy_(opaque(function_name(function), run, tensors_of((args, kwargs)), [outline])[0])


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Put other tensors in place of those in nested containers, in the order of `tensors_of`."""
    rest = iter(tensors)

    def put(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(rest)
        if isinstance(value, list | tuple):
            return type(value)(map(put, value)) if type(value) in (list, tuple) else value
        return {k: put(v) for k, v in value.items()} if isinstance(value, dict) else value

    return put(value)


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse operators that draw in the graph itself, where a compiler would draw other numbers or in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs or {}):
            raise DTensorError(
                f"{func} draws random numbers in a way that compiled code would not repeat. "
                "Draw outside of what is static, or leave out compile"
            )
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given == 0)
    return False


# ------------------------------------------------------------------ functions that those call


def _start(original: Any, step: Any, local: Tensor) -> steps.Started:
    def run(tensors: list[Tensor]) -> list[Tensor]:
        span = record.begin(type(step).__name__)
        work, finish = original(step, tensors[0])
        if work is not None:
            work.wait()
        made = finish()
        record.end(span)
        return [made]

    shape = getattr(step, "shape", local.shape)
    (made,) = opaque(type(step).__name__, run, [local], [like(local, shape)])
    return None, lambda: made


def _start_in_place(original: Any, step: Any, out: Tensor, *_: Any) -> None:
    def run(tensors: list[Tensor]) -> list[Tensor]:
        summed = tensors[0].clone(memory_format=torch.contiguous_format)
        work = original(step, summed)
        if work is not None:
            work.wait()
        return [summed]

    out.copy_(opaque("AllReduce", run, [out], [like(out, out.shape)])[0])


def _extremum(original: Any, step: Any, out: Tensor) -> Tensor:
    def run(tensors: list[Tensor]) -> list[Tensor]:
        return [original(step, tensors[0].clone(memory_format=torch.contiguous_format))]

    return out.copy_(opaque("ReduceExtremum", run, [out], [like(out, out.shape)])[0])


def _exchange(original: Any, window: Any, local: Tensor, *args: Any) -> Tensor:
    target = args[-1]
    return opaque("Window", lambda t: [original(window, t[0], *args)], [local], [like(local, target[1])])[0]


def _deal(original: Any, x: Tensor, dim: int, before: Any, after: Any, me: int, *rest: Any) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(length for _, length in after[me])
    return opaque("Deal", lambda t: [original(t[0], dim, before, after, me, *rest)], [x], [like(x, shape)])[0]


class _Round:
    """In place of tensors under way in a ring."""

    def __init__(self, original: Any, ring: Any, tensors: list[Tensor], shapes: list[torch.Size]) -> None:
        def run(given: list[Tensor]) -> list[Tensor]:
            return [t.clone() for t in original(ring, given, shapes).wait()]

        self._got = opaque("Ring", run, tensors, [like(tensors[0], s) for s in shapes])

    def wait(self) -> list[Tensor]:
        return self._got


_INSIDE: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (move, "alias", lambda original, x: _alias(x)),
    (steps.AllReduce, "start", _start),
    (steps.AllReduce, "start_in_place", _start_in_place),
    (steps.AllReduce, "start_ranked", _start_in_place),
    (steps.AllGather, "start", _start),
    (steps.Exchange, "start", _start),
    (steps.ReduceScatter, "start", _start),
    (irregular.PieceExchange, "start", _start),
    (irregular.PieceReduceScatter, "start", _start),
    (steps.ReduceExtremum, "run", _extremum),
    (_windows.Window, "exchange", _exchange),
    (_ring, "_deal", _deal),
    (_ring, "_Round", _Round),
)
"""What sends data (and what makes aliases), and what does so in a graph."""


@functools.cache
def _install() -> None:
    """Put what is for graphs in place; outside of them the originals run as ever."""
    for owner, name, substitute in _INSIDE:
        replace_once(owner, name, functools.partial(_either, substitute))


def _either(substitute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def wrapper(*args: Any) -> Any:
        return original(*args) if here.steps is None else substitute(original, *args)

    return wrapper


def _refuse(event: record.Collective) -> None:
    if here.steps is not None:
        raise DTensorError(
            f"an operator sends data ({event.name}) in a way that cannot be part of compiled code; leave out compile"
        )


@contextmanager
def tracing(program: Steps) -> Iterator[None]:
    """Let what communicates or draws become steps of a graph within a ``with`` block."""
    _install()
    record.listeners.append(_refuse)
    try:
        with trace(program):
            yield
    finally:
        record.listeners.remove(_refuse)
