"""Moves: redistribution of DTensors that autograd understands.

The backward of a move from a to b is the move from dual(b) to dual(a). Two moves that every
training step makes many times avoid a Python autograd node:

* I to R (a replicated value meets sharded ones) is an alias with a gradient hook that all-reduces.
  One alias is kept per tensor, so q, k and v share one all-reduce; it is dropped in its backward.
* P to I is a clone (its backward is the identity) reduced in place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .._order import in_order
from .._spec import Spec
from .._tap import alias, slot
from ..placements import AxisTypes, I, P
from . import record
from .plan import Plan, plan
from .steps import AllReduce, Started

if TYPE_CHECKING:
    from .._tensor import DTensor

_run = torch._C._disabled_torch_function_impl
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_leaf = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_version = Tensor._version.__get__  # type: ignore[attr-defined]
_stride = Tensor.stride
_grad_enabled = torch.is_grad_enabled


watchers: list[Callable[[], None]] = []
"""Told of every differentiable move before it is made, so that `explain()` knows what its backward belongs to."""


def strip(x: DTensor) -> Tensor:
    """Return the local part as a plain tensor that is connected to the graph of `x`."""
    return alias(x)


def needs_grad(x: Tensor) -> bool:
    """Whether autograd would record what is done with `x` now."""
    return _grad_enabled() and bool(_run(_requires_grad, (), (x,), {}))


def run_plan(local: Tensor, steps: Plan, *, ranked: bool = False) -> Tensor:
    """Run a plan on plain local data, without autograd. Dims keep their order in memory, as on one device.

    Args:
        local: the data.
        steps: the plan.
        ranked: whether sums are those of parameters' gradients, in the order of ranks.
    """
    shape, stride = local.shape, local.stride()
    for step in steps.steps:
        if ranked and isinstance(step, AllReduce):
            local = local.clone(memory_format=torch.contiguous_format)
            step.run_in_place(local, ranked=True)
            continue
        span = record.begin(type(step).__name__)
        work, finish = step.start(local)
        if work is not None:
            work.wait()
        local = finish()
        record.end(span)
    return local if stride == steps.stride or not steps.ordered else in_order(local, shape, stride)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Spec, target: Spec, leaf: bool) -> Tensor:
        ctx.specs, ctx.leaf = (source, target), leaf
        return run_plan(local, plan(source, target.types))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.specs
        return move_local(grad, target.dual, source.dual.types, ranked=ctx.leaf), None, None, None


class _Attach(torch.autograd.Function):
    """Give a result that was computed outside the graph the backward of the move that made it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Spec, target: Spec, result: Tensor) -> Tensor:
        ctx.specs = source, target
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.specs
        return move_local(grad, target.dual, source.dual.types), None, None, None


def move_local(local: Tensor, source: Spec, types: AxisTypes, *, ranked: bool = False) -> Tensor:
    """Move a plain local tensor; differentiable.

    Args:
        local: the tensor.
        source: where it is.
        types: where to.
        ranked: whether it is the gradient of a leaf, as of a parameter, whose sums have the same bits in every message.
    """
    if isinstance(local, dtensor_class()):  # some backwards return a saved input as the gradient of an empty shard
        local = strip(local)
    if source.types == types:
        return local
    if slot.active and slot.recorder is not None:
        moved: Tensor = slot.recorder.atomic(move_local, (local, source, types), {"ranked": ranked})
        return moved
    steps = plan(source, types)
    if torch.is_grad_enabled() and local.requires_grad:
        return _Move.apply(local, source, steps.target, False)  # type: ignore[no-any-return, no-untyped-call]
    return run_plan(local, steps, ranked=ranked)


def move(x: DTensor, types: AxisTypes) -> DTensor:
    """Move a DTensor to other axis types; differentiable. Free where only I and R change and no gradient is needed."""
    spec = x._spec
    if spec.types == types:
        return x
    if slot.active and slot.recorder is not None:
        return slot.recorder.move(x, types)  # type: ignore[no-any-return]
    if watchers:
        for watch in watchers:
            watch()
    steps: Plan = spec.plans.get(types) or plan(spec, types)
    kind, gradients = steps.kind, needs_grad(x)
    y: Any
    if kind == "cast" and gradients:
        return _cast(x, types, steps)
    if kind == "reduce" and gradients:
        y = _reduce(x, steps)
    elif kind == "alias" or (kind in ("cast", "relabel") and not gradients):
        y = strip(x)
    elif gradients:
        if bucketing.entrance is not None and "_is_param" in x.__dict__:
            made = bucketing.entrance.cast(x, types, steps)
            if made is not None:
                return made
        y = _Move.apply(strip(x), spec, steps.target, _is_leaf(x))  # type: ignore[no-untyped-call]
    else:
        y = run_plan(strip(x), steps)
    y.__class__ = dtensor_class()
    y._spec = steps.target
    return y  # type: ignore[no-any-return]


class Transfer:
    """A plan under way on plain local data, without autograd: all of it is done but the last collective.

    Args:
        local: what is moved.
        steps: the plan.
    """

    __slots__ = ("_local", "_order", "_running", "_span")

    def __init__(self, local: Tensor, steps: Plan) -> None:
        stride = local.stride()
        self._order = (local.shape, stride) if steps.ordered and stride != steps.stride else None
        self._running: Started | None = None
        self._span: object | None = None
        self._local = self._start(local, steps)

    def _start(self, local: Tensor, steps: Plan) -> Tensor | None:
        """Run up to and including the start of the last step; return the result if nothing is under way then."""
        for number, step in enumerate(steps.steps, 1):
            span = record.begin(type(step).__name__)
            work, finish = step.start(local)
            if work is not None and number == len(steps.steps):
                self._running, self._span = (work, finish), span
                return None
            if work is not None:
                work.wait()
            local = finish()
            record.end(span)
        return local

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._running is None or self._running[0] is None or bool(self._running[0].is_completed())

    def wait(self) -> Tensor:
        """Return what arrived, once; the transfer holds nothing from then on."""
        local, self._local = self._local, None
        if self._running is not None:
            (work, finish), self._running = self._running, None
            if work is not None:
                work.wait()
            local = finish()
            record.end(self._span)
        assert local is not None
        return local if self._order is None else in_order(local, *self._order)


class Pending:
    """A redistribution under way; `wait()` returns the DTensor.

    Made by `DTensor.redistribute(..., async_op=True)`. The last collective of the plan runs while
    the program goes on; every rank must wait for its pending moves in the same order.
    """

    def __init__(self, x: DTensor, types: AxisTypes) -> None:
        self._steps = plan(x._spec, types)
        self._source = strip(x)
        self._result: DTensor | None = None
        self._transfer = Transfer(self._source.detach(), self._steps)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._transfer.is_completed()

    def wait(self) -> DTensor:
        """Return the redistributed tensor; may be called again."""
        if self._result is None:
            source, target = self._steps.source, self._steps.target
            y: Any = self._transfer.wait()
            if needs_grad(self._source):
                y = _Attach.apply(self._source, source, target, y)  # type: ignore[no-untyped-call]
            y.__class__ = dtensor_class()
            y._spec = target
            self._result = y
            del self._source
        assert self._result is not None
        return self._result


# ------------------------------------------------------------------ the two cheap moves


def forget_casts(x: Tensor) -> None:
    """Drop the casts of a tensor that were kept for others: its gradient has come, or it is another tensor now."""
    x.__dict__.pop("_casts", None)


def forget_casts_of(references: Iterable[weakref.ref[Tensor]]) -> None:
    """Drop the casts of those tensors that there still are."""
    for reference in references:
        x = reference()
        if x is not None:
            forget_casts(x)


class Entrance(Protocol):
    """What casts parameters together (see `_modules.entrance`)."""

    def cast(self, x: DTensor, types: AxisTypes, steps: Plan) -> DTensor | None:
        """Cast a tensor with its bucket, and perhaps move the cast within the rank; None: it has none."""


class _Bucketing(threading.local):
    entrance: Entrance | None = None


bucketing = _Bucketing()
"""Whose parameters are cast together now, if a parallelized module runs in this thread."""


class _ReduceGradient:
    """Gradient hook of a cast from I to R: sums the ranks' gradients, and forgets the cast."""

    __slots__ = ("leaf", "owner", "reducer", "source", "target")

    def __init__(self, owner: Callable[[], DTensor | None], steps: Plan, *, leaf: bool) -> None:
        self.owner, self.leaf = owner, leaf
        self.source, self.target = steps.target.dual, steps.source.dual  # P to I
        assert steps.reducer is not None
        self.reducer = steps.reducer

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        owner = self.owner()
        if owner is not None:
            forget_casts(owner)
        if grad is None:  # undefined, and so on every rank, as their graphs are alike
            return None
        if grad.requires_grad:  # create_graph=True: stay differentiable
            return move_local(grad, self.source, self.target.types)
        out = grad.clone(memory_format=torch.contiguous_format)
        self.reducer.run_in_place(out, ranked=self.leaf)
        return out


def _is_leaf(x: Tensor) -> bool:
    return bool(_run(_leaf, (), (x,), {}))


def _cast(x: DTensor, types: AxisTypes, steps: Plan) -> DTensor:
    casts: dict[AxisTypes, tuple[DTensor, int]] | None = x.__dict__.get("_casts")
    version = _run(_version, (), (x,), {})
    if casts is not None:
        hit = casts.get(types)
        if hit is not None and hit[1] == version:
            return hit[0]
    if bucketing.entrance is not None:
        made = bucketing.entrance.cast(x, types, steps)
        if made is not None:
            return made
    casts = x.__dict__.setdefault("_casts", {})
    y: Any = strip(x)
    y.register_hook(_ReduceGradient(weakref.ref(x), steps, leaf=_is_leaf(x)))
    y.__class__ = dtensor_class()
    y._spec, y._is_cast = steps.target, True
    casts[types] = (y, version)
    return y  # type: ignore[no-any-return]


def _reduce(x: DTensor, steps: Plan) -> Tensor:
    y: Tensor = _run(Tensor.clone, (), (x,), {"memory_format": torch.contiguous_format})
    (step,) = steps.steps
    assert isinstance(step, AllReduce)
    step.run_in_place(y.detach())
    source, target = steps.target.dual, steps.source.dual.types  # I to R

    def keep_differentiable(grad: Tensor | None) -> Tensor | None:
        """Under create_graph=True the gradient's own gradient is a pending sum, which a clone does not add up."""
        return move_local(grad, source, target) if grad is not None and grad.requires_grad else None

    y.register_hook(keep_differentiable)  # type: ignore[no-untyped-call]
    stride = _run(_stride, (), (x,), {})
    return y if stride == steps.stride or not steps.ordered else in_order(y, y.shape, stride)


def reduced_types(types: AxisTypes) -> AxisTypes:
    """The same layout with pending sums turned into I."""
    return tuple(I if t == P else t for t in types)


_class: type[DTensor] | None = None


def dtensor_class() -> type[DTensor]:
    """Return `DTensor`, which cannot be imported here."""
    global _class
    if _class is None:
        from .._tensor import DTensor

        _class = DTensor
    return _class
