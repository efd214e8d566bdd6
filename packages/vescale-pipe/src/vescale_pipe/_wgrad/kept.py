"""What is kept of a micro-batch between its forward, I and W, and the hooks that keep it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import PipeError
from .formulas import Formula, ready_made

__all__ = ["Kept", "Share", "alias_of", "keep"]

_task = torch._C._current_graph_task_id

_grad_enabled = torch.is_grad_enabled
_view = torch.ops.aten._unsafe_view.default
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Share(NamedTuple):
    """What one use of a weight adds to its gradient."""

    formula: Formula
    """Makes it."""
    root: tuple[Tensor, ...]
    """The weight, and perhaps a bias."""
    key: tuple[int, int]
    """Which weight, in which call of the autograd engine (a reentrant checkpoint calls it in between): shares with the
    same key are added up before they are accumulated."""
    place: tuple[int, int, int]
    """Where in the sum: autograd adds what was made last first. What led to the weight (its transpose, or the use
    itself) and the use, counted backward, and which argument of the use."""
    turned: int
    """Which transpose of the weight was used, or minus which cast: shares of one are added up before the others; a
    cast in the dtype that it was to. 0 for the weight itself."""
    extra: Any
    """What else the formula takes."""
    x: Tensor
    """Input of the operator, without graph."""
    version: int
    """Of `x` in the forward."""
    dy: Tensor
    """Gradient of the output."""


class Kept:
    """State of one micro-batch of a stage."""

    __slots__ = ("again", "casts", "closed", "forward", "native", "recorded", "serial", "shares", "views")

    def __init__(self) -> None:
        self.shares: list[Share] = []
        """From I to W, in the order in which I came by."""
        self.forward = True
        """Whether the forward is running."""
        self.again = False
        """Whether I runs parts of the forward again: activation checkpoints."""
        self.closed = False
        """Whether W is over: what comes now would be lost."""
        self.native: set[int] = set()
        """Parameters whose gradient is left to autograd, as an operator used them that is not split."""
        self.recorded: set[int] = set()
        """Parameters whose gradient comes in W."""
        self.serial = 0
        """Counts uses and transposes of parameters."""
        self.views: dict[int, tuple[Tensor, Parameter, int]] = {}
        """Transposed parameters, by identity, and which transpose it is."""
        self.casts: dict[Any, tuple[Tensor, int]] = {}
        """What autocast makes of parameters, and minus which cast it is."""

    def count(self) -> int:
        """Return the number of a use."""
        self.serial += 1
        return self.serial

    def end_forward(self) -> None:
        """Drop what only a running forward needs."""
        self.forward = False
        self.views.clear()
        self.casts.clear()


class _Anchor(torch.autograd.Function):
    """Gives a tensor a place in the graph where neither input nor bias has one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, y: Tensor) -> Tensor:
        """Return `y` itself."""
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        """Return no gradients: there is nothing to go on to."""
        return None, None


_anchor = torch.empty(0, requires_grad=True)


def keep(
    kept: Kept, formula: Formula, root: tuple[Tensor, ...], key: int, extra: Any, x: Tensor, y: Tensor, turned: int = 0
) -> Tensor:
    """Make the backward of an operator keep what W needs.

    Args:
        kept: where.
        formula: makes the gradient.
        root: the weight, and perhaps a bias.
        key: which weight.
        extra: what else the formula takes.
        x: input of the operator.
        y: its output, made with a weight that asks for no gradient.
        turned: which transpose it used, or minus which cast.

    Returns:
        The output, with a graph.
    """
    kept.recorded.add(key)
    kept.serial = use = kept.serial + 1
    about = (formula, root, key, (-(abs(turned) or use), -use, 0), turned, extra)
    if not y.requires_grad:
        y = _Anchor.apply(_anchor, _view(y, y.shape))  # type: ignore[no-untyped-call]
    saved = _saved_hooks(True)
    hook: Any
    if saved is None:
        hook = partial(_take, kept, about, x, x._version)
    else:
        # As autograd does with what it saves itself: checkpoints and offloading know of it then.
        kept.again = True
        hook = partial(_take_packed, kept, about, saved[0](x), saved[1])
    # A hook of the node comes after all hooks of the tensor, so it sees what the operator's backward sees. Where the
    # output is a view, an operation in place goes around the view's node.
    base = y._base
    node = y.grad_fn if base is None else base.grad_fn
    node.register_prehook(hook)  # type: ignore[union-attr]
    return y


About = tuple[Formula, tuple[Tensor, ...], int, tuple[int, int, int], int, Any]


def _take(kept: Kept, about: About, x: Tensor, version: int, grads: tuple[Tensor | None, ...]) -> None:
    dy = grads[0]
    if dy is None:
        return
    if kept.forward or kept.closed or _grad_enabled():
        _refuse(kept)
    formula, root, key, place, turned, extra = about
    task = _task() if kept.again else 0
    kept.shares.append(Share(formula, root, (key, task), place, turned, extra, x.detach(), version, dy))


def _take_packed(
    kept: Kept, about: About, packed: Any, unpack: Callable[[Any], Tensor], grads: tuple[Tensor | None, ...]
) -> None:
    if grads[0] is not None:
        x = unpack(packed)
        _take(kept, about, x, x._version, grads)


def _refuse(kept: Kept) -> None:
    if kept.closed:
        raise PipeError("gradients of a micro-batch came after its weight gradients were run: I must come before W.")
    what = "the forward of a stage calls autograd" if kept.forward else "the backward of a stage is differentiated"
    raise PipeError(
        f"{what}: gradients of weights inside of it cannot come later. Use a schedule without I and W, in which each "
        "backward is whole (B)."
    )


def alias_of(kept: Kept, weight: Tensor, root: Parameter, use: int, slot: int, turned: int = 0) -> Tensor:
    """Return a stand-in for a recorded weight, for an operator that is not split.

    Its gradient is made by autograd in I, but waits until W, so that all shares are added up in one go.

    Args:
        kept: where its gradient is kept.
        weight: the weight, or its transpose.
        root: the weight.
        use: number of the use.
        slot: which argument of it.
        turned: which transpose it is.
    """
    alias = weight.detach().requires_grad_()

    def take(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if kept.forward or kept.closed:
            _refuse(kept)
        if grad is not None:
            if turned:
                grad = grad.t()
            key = (id(root), _task() if kept.again else 0)
            place = (-(turned or use), -use, slot)
            kept.shares.append(Share(ready_made, (root,), key, place, turned, None, grad, grad._version, grad))

    alias.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return alias
