"""Moves in two halves: begun as soon as what they move is there, waited for where it is used.

Autograd runs the nodes that were made last first. The backward of the second half begins the move back, that of the
first half waits for it, and what was made between the two runs between the two: the way back overlaps as the way there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._comm.move import move, move_local, needs_grad, strip, watchers
from .._comm.plan import Plan, plan
from .._comm.record import begin as begin_span
from .._comm.record import end as end_span
from .._comm.steps import Started
from .._dispatch.call import function_name
from .._order import in_order
from .recorder import Op, Recorder, tensors_of

__all__ = ["begin", "end", "overlap"]

VIEWS = frozenset(
    "view reshape transpose permute t T mT unsqueeze squeeze expand __getitem__ chunk split narrow select unbind "
    "flatten unflatten detach view_as expand_as contiguous alias swapaxes movedim".split()
)
"""Functions that are over before a message is, so that nothing is won by running them meanwhile."""


class Running:
    """A move under way."""

    __slots__ = ("back", "local", "span", "started", "steps")

    def __init__(self, local: Tensor, steps: Plan) -> None:
        self.local: Tensor | None = local
        """What is moved, until it has arrived."""
        self.steps = steps
        self.started: Started | None = None
        self.span: object = None
        self.back: Running | None = None
        """The way back, while it is under way."""


def begin(x: Tensor, steps: Plan) -> Running:
    """Begin to move a local tensor.

    Args:
        x: of the shape that the source of the plan has here.
        steps: the plan.
    """
    for watch in watchers:
        watch()
    local = strip(x)  # type: ignore[arg-type]
    running = Running(local, steps)
    if needs_grad(local):
        running.local = _Begin.apply(local, running)  # type: ignore[no-untyped-call]
    else:
        _start(running)
    return running


def end(running: Running) -> Tensor:
    """Return what a move brought; differentiable."""
    assert running.local is not None
    if needs_grad(running.local):
        moved: Tensor = _End.apply(running.local, running)  # type: ignore[no-untyped-call]
        return moved
    return _ended(running)


def _start(running: Running) -> None:
    """Run a plan up to the start of its last step."""
    local = running.local
    assert local is not None
    running.span = begin_span("move")
    *first, last = running.steps.steps
    for step in first:
        work, finish = step.start(local)
        if work is not None:
            work.wait()
        local = finish()
    running.started = last.start(local)


def _ended(running: Running) -> Tensor:
    assert running.started is not None
    assert running.local is not None
    work, finish = running.started
    if work is not None:
        work.wait()
    moved = finish()
    end_span(running.span)
    local, steps = running.local, running.steps
    running.started = running.local = None  # autograd keeps the move, but its memory is free from now on
    return in_order(moved, local.shape, local.stride()) if steps.ordered and local.stride() != steps.stride else moved


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, running: Running) -> Tensor:
        ctx.running = running
        _start(running)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        running: Running = ctx.running
        if running.back is None:  # create_graph=True: it was moved at once
            return grad, None
        back, running.back = running.back, None
        return _ended(back), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, running: Running) -> Tensor:
        ctx.running = running
        return _ended(running)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        running: Running = ctx.running
        source, target = running.steps.source, running.steps.target
        back = plan(target.dual, source.dual.types)
        if grad.requires_grad or not back.steps:
            return move_local(grad, target.dual, source.dual.types), None
        running.back = Running(grad, back)
        _start(running.back)
        return grad.new_zeros(()).expand(source.local_shape), None


def overlap(ops: Sequence[Op], recorder: Recorder, *, exact: bool) -> tuple[list[Op], int]:
    """Split moves that other steps can run beside; return the steps and how many moves were split.

    No half passes another communication, so that all ranks begin them in one order.

    Args:
        ops: the steps.
        recorder: that noted them.
        exact: whether gradients must be added in the order of the dynamic path, which a move that begins earlier than
            two other uses of its source would change.
    """
    out = list(ops)
    split = 0
    for op in ops:
        steps = _asynchronous(op)
        if steps is None:
            continue
        at = next(i for i, o in enumerate(out) if o is op)
        early, late = _earliest(out, at, recorder, exact=exact), _latest(out, at, recorder)
        if not any(_takes_time(o) for o in (*out[early:at], *out[at + 1 : late])):
            continue
        token = torch.empty(0)
        first = Op(begin, (op.args[0], steps), {}, token, op.gradients, True)
        last = Op(end, (token,), {}, op.result, op.gradients, True)
        out[early:late] = [first, *out[early:at], *out[at + 1 : late], last]
        recorder.know(token)
        split += 1
    return out, split


def _asynchronous(op: Op) -> Plan | None:
    """The plan of a move whose way there sends something."""
    if op.function is not move or op.keeps:
        return None
    steps = plan(op.kwargs["spec"], op.args[1])
    return steps if steps.kind in ("reduce", "general") and any(hasattr(s, "group") for s in steps.steps) else None


def _earliest(ops: Sequence[Op], at: int, recorder: Recorder, *, exact: bool) -> int:
    """The first position where the move at a position could begin."""
    source, gradients = ops[at].args[0], ops[at].gradients
    name = recorder.first(source)
    uses = sum(any(recorder.first(t) == name for t in tensors_of((o.args, o.kwargs))) for o in ops)
    if exact and source.requires_grad and uses > 2:
        return at
    position = at
    while position > 0:
        before = ops[position - 1]
        makes = any(recorder.first(t) == name for t in tensors_of(before.result))
        if makes or _stays(before) or before.gradients != gradients:
            break
        position -= 1
    return position


def _latest(ops: Sequence[Op], at: int, recorder: Recorder) -> int:
    """The first position after that of a move where its result must be there."""
    name, gradients = recorder.first(ops[at].result), ops[at].gradients
    for position in range(at + 1, len(ops)):
        op = ops[position]
        uses = any(recorder.first(t) == name for t in tensors_of((op.args, op.kwargs)))
        if uses or _stays(op) or op.gradients != gradients:
            return position
    return len(ops)


def _stays(op: Op) -> bool:
    """Whether a step may send something, now or on the way back, or does more than to return its result."""
    module = getattr(op.function, "__module__", None) or ""
    return op.keeps or op.function is move or module.startswith("vescale_")


def _takes_time(op: Op) -> bool:
    return function_name(op.function) not in VIEWS
