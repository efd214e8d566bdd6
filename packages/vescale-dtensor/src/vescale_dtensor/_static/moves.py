"""Moves of plain local tensors, as a program makes them: what `_comm.move.move` does, without labels and caches."""

from __future__ import annotations

from torch import Tensor

from .._comm.move import _cast, _Move, _reduce, _ReduceGradient, needs_grad, run_plan, strip, watchers
from .._comm.plan import Plan

__all__ = ["cast", "shift"]


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
    kind, gradients = steps.kind, needs_grad(local)
    if not gradients:
        if kind in ("alias", "cast", "relabel"):
            return strip(local)  # type: ignore[arg-type]
        return run_plan(strip(local), steps)  # type: ignore[arg-type]
    if kind == "cast":
        y = strip(local)  # type: ignore[arg-type]
        y.register_hook(_ReduceGradient(_nobody, steps))  # type: ignore[no-untyped-call]
        return y
    if kind == "reduce":
        return _reduce(local, steps)  # type: ignore[arg-type]
    if kind == "alias":
        return strip(local)  # type: ignore[arg-type]
    moved: Tensor = _Move.apply(strip(local), steps.source, steps.target)  # type: ignore[no-untyped-call, arg-type]
    return moved


def _nobody() -> None:
    """Stand for the weak reference to the owner of a cast: in a program nobody keeps one."""
