"""Functions that treat every item of their leading dims by itself: matrices in linear algebra, signals, images.

Batch dims broadcast against each other as in elementwise functions, and any of them may be sharded.
Shapes come from a run of the function on the meta device, once per kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .._dispatch.call import Call, LocalFunction, Rule, Shape, Strategy
from .._dispatch.entry import RuleFunction
from .._spec import Spec
from ..placements import P, R
from .pointwise import broadcast, elementwise_strategies

Cores = Sequence[int] | Callable[[Call], "Sequence[int] | None"]
"""Number of trailing dims that make an item, per tensor argument; or how to find it, None for no answer."""


def meta_shapes(call: Call) -> list[Shape]:
    """Shapes of the results on whole tensors; raises torch's own errors."""

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        return value

    args, kwargs = tree_map(meta, (call.args, call.kwargs))
    with _disable_current_modes():  # whoever counts operators shall not count this one
        result = call.func(*args, **kwargs)
    return [tuple(r.shape) for r in (result if isinstance(result, tuple | list) else [result])]


def shapes_of(call: Call) -> list[Shape] | None:
    """The same, or None where torch has no meta function, or refuses: its error then comes from whole tensors."""
    try:
        return meta_shapes(call)
    except (NotImplementedError, RuntimeError):
        return None


def ordered(call: Call) -> bool:
    """Whether the tensor arguments surely stand in the order of the signature: at most one is named."""
    return sum(isinstance(path[0], str) for path in call.paths) <= 1


def spared(call: Call, ins: Sequence[Spec], outs: Sequence[Spec]) -> LocalFunction | None:
    """Spare a function that refuses or mistakes empty tensors the sight of an empty part.

    It runs on one made-up item instead, which is cut off its results. None where this rank's part is not empty.
    """
    empty = [tuple(d for d, n in enumerate(s.local_shape) if not n and s.shape[d]) for s in ins]
    if not any(empty) or any(len(path) > 1 for path in call.paths):
        return None
    paths = [path[0] for path in call.paths]

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for path, dims in zip(paths, empty, strict=True):
            given[path] = _made_up(given[path], dims)
        result = func(*[given[i] for i in range(len(args))], **{k: given[k] for k in kwargs})
        if isinstance(result, Tensor):
            return _cut(result, outs[0])
        return type(result)([_cut(r, o) for r, o in zip(result, outs, strict=True)])

    return local


def _made_up(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`x` with one item along its empty dims, connected to its graph: a diagonal matrix, or positions from one on."""
    if not dims:
        return x
    pad = [0] * (2 * x.ndim)
    for d in dims:
        pad[2 * (x.ndim - 1 - d) + 1] = 1
    x = torch.constant_pad_nd(x, pad, 0)
    if x.ndim < 2 or x.dtype == torch.bool:
        return x
    steps = torch.arange(1, x.shape[-1] + 1, device=x.device).to(x.dtype)
    if not x.is_floating_point() and not x.is_complex():
        return x + steps
    return x + torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device) * steps


def _cut(result: Tensor, spec: Spec) -> Tensor:
    for dim, length in enumerate(spec.local_shape):
        result = result if result.shape[dim] == length else result.narrow(dim, 0, length)
    return result


def batched(
    cores: Cores, *, linear: int | None = None, shapes: Callable[[Call], list[Shape] | None] = shapes_of
) -> RuleFunction:
    """Rule of a function of items with batch dims before them.

    Args:
        cores: see `Cores`.
        linear: operand in which the function is linear, so that a pending sum there stays one.
        shapes: gives the shapes of the results, None for no answer.
    """

    def rule(call: Call) -> Rule | None:
        own = cores(call) if callable(cores) else cores[: len(call.specs)]
        if own is None or len(own) != len(call.specs) or not ordered(call):
            return None
        if any(s.ndim < core for s, core in zip(call.specs, own, strict=True)):
            return None  # torch's own error
        results = shapes(call)
        if results is None:
            return None
        batches = [s.shape[: s.ndim - core] for s, core in zip(call.specs, own, strict=True)]
        batch = broadcast(batches)
        has_batch = [s[: len(batch)] == batch for s in results]
        if any(0 not in s for s, has in zip(results, has_batch, strict=True) if not has):
            return None
        strategies = [
            Strategy(s.ins, tuple(d if has else R for has in has_batch))
            for d, s in enumerate(elementwise_strategies(batches, batch))
        ]
        if linear is not None:
            ins = tuple(P if i == linear else R for i in range(len(own)))
            strategies.append(Strategy(ins, (P,) * len(results), exact=True))
        return Rule(results, strategies, lambda ins, outs: spared(call, ins, outs))

    return rule


__all__ = ["batched", "meta_shapes", "ordered", "shapes_of", "spared"]
