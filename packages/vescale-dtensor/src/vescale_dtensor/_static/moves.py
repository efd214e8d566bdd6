"""Moves of plain local tensors, as a program makes them: what `_comm.move.move` does, without labels and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import _cast, move_local, needs_grad, run_plan, strip, watchers
from .._comm.nodes import applied
from .._comm.plan import Plan
from .._comm.steps import AllReduce
from .._order import in_order

__all__ = ["cast", "for_node", "shift"]


def cast(x: Tensor, steps: Plan) -> Tensor:
    """Return a parameter or an input as one whose gradients are summed over ranks; the same one until they were.

    Args:
        x: a DTensor that requires gradients.
        steps: from I to R.
    """
    return _cast(x, steps.target.types, steps)  # type: ignore[arg-type]


def shift(local: Tensor, steps: Plan) -> Tensor:
    """Move a local tensor by a plan; differentiable.

    Args:
        local: of the shape that the source of the plan has here.
        steps: the plan.
    """
    for watch in watchers:
        watch()
    kind = steps.kind
    if needs_grad(local) and kind != "alias":
        node = _NODES.get(kind)
        given = for_node(local)
        return node(given, steps) if node is not None else _general(given, steps, local.is_leaf)  # type: ignore[no-any-return]
    alias = strip(local)  # type: ignore[arg-type]  # another object: what a program returns is labelled
    return alias if kind in ("alias", "cast", "relabel") else run_plan(alias, steps)


def for_node(local: Tensor) -> Tensor:
    """Return what a node may take; most tensors of a program are plain already."""
    return local if local.__class__ is Tensor else strip(local)  # type: ignore[arg-type]


class _Cast(torch.autograd.Function):
    """I to R: an alias, whose gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: Plan) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.steps = steps
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        steps: Plan = ctx.steps
        if grad is None:
            return None, None
        if grad.requires_grad:  # create_graph=True: stay differentiable
            return move_local(grad, steps.target.dual, steps.source.dual.types), None
        assert steps.reducer is not None
        out = grad.clone(memory_format=torch.contiguous_format)
        steps.reducer.run_in_place(out)
        return out, None


class _Reduce(torch.autograd.Function):
    """P to I: a copy that is summed over ranks where it lies, and whose gradients are passed on."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: Plan) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.steps = steps
        out = local.clone(memory_format=torch.contiguous_format)
        (step,) = steps.steps
        assert isinstance(step, AllReduce)
        step.run_in_place(out)
        stride = local.stride()
        return out if stride == steps.stride or not steps.ordered else in_order(out, out.shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None or not grad.requires_grad:
            return grad, None
        steps: Plan = ctx.steps  # the gradient's own gradient is a pending sum
        return move_local(grad, steps.target.dual, steps.source.dual.types), None


class _General(torch.autograd.Function):
    """Everything else: the way back is the move between the duals."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: Plan, leaf: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.leaf = steps, leaf
        return run_plan(local, steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        steps: Plan = ctx.steps
        if grad is None:
            return None, None, None
        return move_local(grad, steps.target.dual, steps.source.dual.types, ranked=ctx.leaf), None, None


_general = applied(_General)
_NODES = {"cast": applied(_Cast), "reduce": applied(_Reduce)}
