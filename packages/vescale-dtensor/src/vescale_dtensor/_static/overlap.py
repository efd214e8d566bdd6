"""Moves in two halves: begun as soon as what they move is there, waited for where it is used.

Autograd runs the nodes that were made last first. The backward of the second half begins the move back, that of the
first half waits for it, and what was made between the two runs between the two: the way back overlaps as the way there.
What has no gradient, as the number of tokens of a batch, is made earlier than the call did, if that lets a move begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._comm.move import Transfer, move_local, needs_grad, strip, watchers
from .._comm.nodes import applied
from .._comm.plan import Plan, plan
from .._comm.steps import AllReduce
from .._comm.totals import begin_sum, end_sum, sum_over
from .._dispatch.call import function_name
from .moves import for_node
from .recorder import Op
from .values import Value, values_of

__all__ = ["begin", "end", "overlap"]

VIEWS = frozenset(
    "view reshape transpose permute t T mT unsqueeze squeeze expand __getitem__ chunk split narrow select unbind "
    "flatten unflatten detach view_as expand_as contiguous alias swapaxes movedim".split()
)
"""Functions that are over before a message is, so that nothing is won by running them meanwhile."""


class Running:
    """A move under way, and its way back.

    Args:
        steps: the plan.
    """

    __slots__ = ("back", "local", "steps", "there")

    def __init__(self, steps: Plan) -> None:
        self.steps = steps
        self.local: Tensor | None = None
        """What is moved, connected to its graph, until it has arrived; None: without gradients."""
        self.there: Transfer | None = None
        self.back: Transfer | None = None


def begin(x: Tensor, steps: Plan) -> Running:
    """Begin to move a local tensor.

    Args:
        x: of the shape that the source of the plan has here.
        steps: the plan.
    """
    for watch in watchers:
        watch()
    running = Running(steps)
    if needs_grad(x):
        running.local = _start(for_node(x), running)
    else:  # another object: what a program returns is labelled
        running.there = Transfer(strip(x), steps)  # type: ignore[arg-type]
    return running


def end(running: Running) -> Tensor:
    """Return what a move brought; differentiable."""
    local, running.local = running.local, None  # autograd keeps the move, but not what was moved
    if local is not None:
        moved: Tensor = _finish(local, running)
        return moved
    return _arrived(running)


def _arrived(running: Running) -> Tensor:
    assert running.there is not None
    there, running.there = running.there, None
    return there.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, running: Running) -> Tensor:
        ctx.running = running
        running.there = Transfer(local, running.steps)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        running: Running = ctx.running
        back, running.back = running.back, None
        if back is None:  # create_graph=True: it was moved at once
            return grad, None
        return back.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, running: Running) -> Tensor:
        ctx.running = running
        return _arrived(running)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        running: Running = ctx.running
        source, target = running.steps.source, running.steps.target
        back = plan(target.dual, source.dual.types)
        if grad.requires_grad or not back.steps:
            return move_local(grad, target.dual, source.dual.types), None
        running.back = Transfer(grad, back)
        return grad.new_zeros(()).expand(source.local_shape), None


_start, _finish = applied(_Begin), applied(_End)


def overlap(ops: Sequence[Op], *, exact: bool) -> tuple[list[Op], int]:
    """Split moves that other steps can run beside; return the steps and how many moves were split.

    No half passes another communication, so that all ranks begin them in one order.

    Args:
        ops: the steps.
        exact: whether gradients must be added in the order of the dynamic path, which a move that begins earlier than
            two other uses of its source would change.
    """
    out = list(ops)
    split = 0
    for op in ops:
        halves = _halves(op)
        if halves is None:
            continue
        at = next(i for i, o in enumerate(out) if o is op)
        before, late = _earliest(out, at, exact=exact), _latest(out, at)
        if not any(_takes_time(o) for o in (*before.passed, *out[at + 1 : late])):
            continue
        first, last = halves
        out[before.start : late] = [*before.pulled, first, *before.passed, *out[at + 1 : late], last]
        split += 1
    return out, split


def _halves(op: Op) -> tuple[Op, Op] | None:
    """Return the two halves of a step that sends something; None: it is none that can be taken apart."""
    start: Callable[..., Any] = begin_sum
    finish: Callable[..., Any] = end_sum
    args = op.args
    if op.function is not sum_over:
        steps = _asynchronous(op)
        if steps is None:
            return None
        start, finish, args = begin, end, (op.args[0], steps)
    token = Value()
    return Op(start, args, {}, token, op.gradients, True), Op(finish, (token,), {}, op.result, op.gradients, True)


def _asynchronous(op: Op) -> Plan | None:
    """The plan of a move whose way there sends something."""
    steps = op.plan
    if steps is None or op.keeps or steps.kind not in ("reduce", "general"):
        return None
    if _is_summed(op.args[0], steps):
        return None
    return steps if _sends(steps) else None


def _is_summed(source: Value, steps: Plan) -> bool:
    """Whether the way back sums the gradient of a leaf over ranks, whose order a transfer does not keep."""
    if not (source.requires_grad and source.leaf):
        return False
    back = plan(steps.target.dual, steps.source.dual.types)
    return any(isinstance(step, AllReduce) and step.num > 2 for step in back.steps)


@dataclass(frozen=True, slots=True)
class _Before:
    """The steps between where a move could begin and where it is."""

    start: int
    """The first position that changes."""
    pulled: list[Op]
    """Those that make what is moved, and have no gradients: they come first."""
    passed: list[Op]
    """All others."""


def _earliest(ops: Sequence[Op], at: int, *, exact: bool) -> _Before:
    """How early the move at a position could begin."""
    source, gradients = ops[at].args[0], ops[at].gradients
    silent = not ops[at].result.requires_grad
    uses = sum(_has(source.first, (o.args, o.kwargs)) for o in ops)
    if exact and source.requires_grad and uses > 2:
        return _Before(at, [], [])
    needed = {source.first}
    pulled: list[Op] = []
    passed: list[Op] = []
    position = at
    while position > 0:
        before = ops[position - 1]
        makes = {value.first for value in values_of(before.result)}
        needs = not needed.isdisjoint(makes)
        if _stays(before, silent) or before.gradients != gradients or (needs and any(v.requires_grad for v in makes)):
            break
        if needs:
            pulled.append(before)
            needed.update(value.first for value in values_of((before.args, before.kwargs)))
        else:
            passed.append(before)
        position -= 1
    return _Before(position, pulled[::-1], passed[::-1])


def _latest(ops: Sequence[Op], at: int) -> int:
    """The first position after that of a move where its result must be there."""
    name, gradients = ops[at].result.first, ops[at].gradients
    silent = not ops[at].result.requires_grad
    for position in range(at + 1, len(ops)):
        op = ops[position]
        if _has(name, (op.args, op.kwargs)) or _stays(op, silent) or op.gradients != gradients:
            return position
    return len(ops)


def _has(first: Value, nested: Any) -> bool:
    return any(value.first is first for value in values_of(nested))


def _stays(op: Op, silent: bool) -> bool:
    """Whether a half of a move may not pass a step: that may send something, or does more than to return its result.

    Args:
        op: the step.
        silent: whether the move has no way back, so that only what is sent on the way there counts.
    """
    steps = op.plan
    if steps is not None:
        return op.keeps or _sends(steps) or (not silent and _sends(plan(steps.target.dual, steps.source.dual.types)))
    module = getattr(op.function, "__module__", None) or ""
    return op.keeps or module.startswith("vescale_")


def _sends(steps: Plan) -> bool:
    return any(hasattr(step, "group") for step in steps.steps)


def _takes_time(op: Op) -> bool:
    return function_name(op.function) not in VIEWS
