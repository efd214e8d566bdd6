"""Cross entropy and negative log likelihood: batch sharded, classes sharded, or both.

A mean over a sharded batch is the local sum over the *global* number of valid tokens: a pending
sum whose denominator is known on every rank. Over sharded classes the logits are never gathered:
each rank contributes a maximum, a sum of exponentials and the logit of its targets, so what is
communicated is two or three numbers per token, and nothing in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._comm.steps import ReduceExtremum
from .._comm.totals import Total, reducer_over, sum_over
from .._dispatch.call import Call, LocalFunction, Rule, Shape, Strategy
from .._dispatch.engine import Cache, Handler, execute, keyed_handler, remember
from .._dispatch.entry import Entry, NoRule, miss
from .._dispatch.fallback import gather_fallback
from .._irregular import is_cut
from .._mesh import Axes, MeshInfo
from .._spec import Spec
from .._tap import alias
from .._tensor import TABLE
from ..errors import UnsupportedOperationError
from ..placements import I, P, R
from ._across import first_order_only

_run = torch._C._disabled_torch_function_impl
_nll_loss_forward = torch.ops.aten.nll_loss_forward.default
_CROSS_ENTROPY = "input target weight size_average ignore_index reduce reduction label_smoothing"
_NLL = "input target weight size_average ignore_index reduce reduction"


@dataclass(frozen=True, slots=True)
class _Task:
    """One loss as this rank computes it."""

    mesh: MeshInfo
    kind: str
    """``cross_entropy``, ``probabilities`` (cross entropy with probability targets) or ``nll``."""
    class_dim: int
    classes: int
    start: int
    """First class that this rank holds."""
    class_axes: Axes
    """Mesh axes that shard the classes."""
    batch_axes: Axes
    """Mesh axes that shard anything else."""
    tokens: int
    """Number of tokens of the whole batch."""
    reduction: str
    ignore_index: int
    smoothing: float


def _maximum_over(x: Tensor, mesh: MeshInfo, axes: Axes) -> Tensor:
    if mesh.size_of(axes) == 1:
        return x
    return ReduceExtremum(mesh, axes, dist.ReduceOp.MAX).run(x.contiguous())


# ------------------------------------------------------------------ cross entropy over sharded classes


class _ShardedCrossEntropy(torch.autograd.Function):
    """Loss per token, the same on all ranks of the class axes, from this rank's logits.

    With q the weight of each class in a token's loss: loss = sum(q) * logsumexp(x) - sum(q * x), and
    the gradient sum(q) * softmax(x) - q, which is local once logsumexp is known.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, task: _Task) -> Tensor:
        ctx.set_materialize_grads(False)
        x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        dim, empty = task.class_dim, logits.shape[task.class_dim] == 0
        top = x.sum(dim) - torch.inf if empty else x.amax(dim)
        top = _maximum_over(top, task.mesh, task.class_axes)
        exponentials = (x - top.unsqueeze(dim)).exp_().sum(dim)
        if task.kind == "probabilities":
            q = _probability_weights(target, weight, task)
            sums = torch.stack([exponentials, (q * x).sum(dim), q.sum(dim).to(x.dtype)])
            exponentials, chosen, total = sum_over(sums, reducer_over(task.mesh, task.class_axes)).unbind(0)
        else:
            sums = torch.stack([exponentials, _chosen_logit(x, target, weight, task)])
            exponentials, chosen = sum_over(sums, reducer_over(task.mesh, task.class_axes)).unbind(0)
            total = _total_weight(target, weight, task, x)
        normalizer = top + exponentials.log()
        ctx.task, ctx.weight = task, weight
        ctx.save_for_backward(logits, target, normalizer, total)
        loss = total * normalizer - chosen
        if task.kind == "cross_entropy":
            loss = loss.masked_fill_(target == task.ignore_index, 0)
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        first_order_only("cross_entropy over sharded classes", "the logits")
        if grad is None:
            return None, None, None, None
        # A saved leaf comes back as the DTensor that it is; dispatch stays off so that it counts as its local part.
        gradients = _run(_gradients, (), (ctx.task, grad, *ctx.saved_tensors, ctx.weight, ctx.needs_input_grad), {})
        return (*gradients, None, None)


def _gradients(
    task: _Task,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    total: Tensor,
    weight: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of logits and of probability targets."""
    dim = task.class_dim
    g = grad.to(normalizer.dtype)
    x = logits.to(normalizer.dtype)
    ignored = (target == task.ignore_index) if task.kind == "cross_entropy" else None
    if ignored is not None:
        g = g.masked_fill(ignored, 0)
    of_logits = of_target = None
    if wanted[0]:
        of_logits = (x - normalizer.unsqueeze(dim)).exp_().mul_((g * total).unsqueeze(dim))
        if ignored is None:
            of_logits -= g.unsqueeze(dim) * _probability_weights(target, weight, task)
        else:
            _subtract_target(of_logits, g, target, weight, task)
            of_logits.masked_fill_(ignored.unsqueeze(dim), 0)  # also where the logits of an ignored token overflowed
        of_logits = of_logits.to(logits.dtype)
    if wanted[1]:
        of_target = (normalizer.unsqueeze(dim) - x) * g.unsqueeze(dim) * (1 - task.smoothing)
        if weight is not None:
            of_target = of_target * _own_classes(weight, x, task)
        of_target = of_target.to(target.dtype)
    return of_logits, of_target


def _own_classes(weight: Tensor, like: Tensor, task: _Task) -> Tensor:
    """Weights of this rank's classes, of the whole weights that every rank has, to multiply `like` with."""
    own = weight.narrow(0, task.start, like.shape[task.class_dim])
    return own.view(-1, *(1,) * (like.ndim - task.class_dim - 1))


def _probability_weights(target: Tensor, weight: Tensor | None, task: _Task) -> Tensor:
    q = target * (1 - task.smoothing) + task.smoothing / task.classes if task.smoothing else target
    return q if weight is None else q * _own_classes(weight, q, task)


def _local_index(target: Tensor, count: int, task: _Task) -> tuple[Tensor, Tensor]:
    """Position of each target among this rank's classes, and where it is not among them.

    What is no class at all stays out of range, so that the gather that follows raises.
    """
    stop = task.start + count
    elsewhere = ((target >= 0) & (target < task.start)) | ((target >= stop) & (target < task.classes))
    elsewhere |= target == task.ignore_index
    return (target - task.start).masked_fill_(elsewhere, 0), elsewhere


def _picked(x: Tensor, target: Tensor, task: _Task) -> Tensor:
    """X at the target of each token where this rank holds it, else zero."""
    dim = task.class_dim
    if x.shape[dim] == 0:
        return x.sum(dim)
    index, elsewhere = _local_index(target, x.shape[dim], task)
    return x.gather(dim, index.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0)


def _token_weight(target: Tensor, weight: Tensor, task: _Task) -> Tensor:
    """Class weight of each token, zero for ignored ones."""
    ignored = target == task.ignore_index
    return weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)


def _chosen_logit(x: Tensor, target: Tensor, weight: Tensor | None, task: _Task) -> Tensor:
    """This rank's part of sum(q * x)."""
    chosen = _picked(x, target, task)
    if weight is not None:
        chosen = chosen * _token_weight(target, weight, task)
    if not task.smoothing:
        return chosen
    spread = x if weight is None else x * _own_classes(weight, x, task)
    return chosen * (1 - task.smoothing) + spread.sum(task.class_dim) * (task.smoothing / task.classes)


def _total_weight(target: Tensor, weight: Tensor | None, task: _Task, like: Tensor) -> Tensor:
    """sum(q) of each token."""
    if weight is None:
        return torch.ones_like(target, dtype=like.dtype)
    total = _token_weight(target, weight, task).to(like.dtype)
    if task.smoothing:
        total = total * (1 - task.smoothing) + weight.sum() * (task.smoothing / task.classes)
    return total


def _subtract_target(gradient: Tensor, g: Tensor, target: Tensor, weight: Tensor | None, task: _Task) -> None:
    """Subtract g * q in place."""
    dim = task.class_dim
    if not gradient.shape[dim]:
        return
    index, elsewhere = _local_index(target, gradient.shape[dim], task)
    part = g * (1 - task.smoothing)
    if weight is not None:
        part = part * _token_weight(target, weight, task)
    gradient.scatter_add_(dim, index.unsqueeze(dim), -part.masked_fill(elsewhere, 0).unsqueeze(dim).to(gradient.dtype))
    if task.smoothing:
        spread = g.unsqueeze(dim) * (task.smoothing / task.classes)
        if weight is not None:
            spread = spread * _own_classes(weight, gradient, task)
        gradient -= spread


# ------------------------------------------------------------------ on local parts


def _losses(logits: Tensor, target: Tensor, weight: Tensor | None, task: _Task) -> Tensor:
    """Loss per token: of type I or P along the class axes, sharded along the batch axes."""
    if task.kind == "nll":
        if not task.class_axes:
            return F.nll_loss(logits, target, weight, ignore_index=task.ignore_index, reduction="none")
        loss = -_picked(logits, target, task)
        return loss if weight is None else loss * _token_weight(target, weight, task)
    if task.class_axes:
        # Saved as plain tensors: the backward runs with dispatch on, where a DTensor would act as the whole.
        parts = [t if t is None else alias(t) for t in (logits, target, weight)]
        return _ShardedCrossEntropy.apply(*parts, task)  # type: ignore[no-any-return, no-untyped-call]
    return F.cross_entropy(
        logits, target, weight, ignore_index=task.ignore_index, reduction="none", label_smoothing=task.smoothing
    )


def _counted(target: Tensor, task: _Task) -> Total:
    """Begin to count the valid tokens of all ranks, which nobody needs before the losses are there."""
    return Total((target != task.ignore_index).sum(), reducer_over(task.mesh, task.batch_axes))


def _denominator(target: Tensor, weight: Tensor | None, task: _Task, dtype: torch.dtype) -> Any:
    """What the mean divides by where that is no count: all probabilities, or the weights of the valid tokens."""
    if task.kind == "probabilities":
        return task.tokens if task.tokens else float("nan")
    assert weight is not None
    total = _token_weight(target, weight.detach(), task).sum(dtype=dtype)
    return sum_over(total, reducer_over(task.mesh, task.batch_axes))


def _total(logits: Tensor, target: Tensor, weight: Tensor | None, task: _Task) -> Tensor:
    """Sum over this rank's tokens; in float32 for narrow types, whose sums overflow where means do not."""
    if task.class_axes or logits.dtype in (torch.float16, torch.bfloat16):
        losses = _losses(logits, target, weight, task)
        return losses.sum(dtype=torch.float32) if losses.element_size() < 4 else losses.sum()
    if task.kind == "nll":
        return F.nll_loss(logits, target, weight, ignore_index=task.ignore_index, reduction="sum")
    return F.cross_entropy(
        logits, target, weight, ignore_index=task.ignore_index, reduction="sum", label_smoothing=task.smoothing
    )


def _constant(weight: Tensor, task: _Task) -> Tensor:
    """Class weights that require gradients: torch gives them none, or we cannot give them any."""
    if task.kind == "probabilities" and not task.class_axes:
        return weight
    if torch.is_grad_enabled() and (task.kind == "probabilities" or task.smoothing):
        raise UnsupportedOperationError(
            "cross_entropy on sharded logits has no gradient for `weight`; pass weight.detach(), or redistribute the "
            "logits and targets to Replicate() first"
        )
    return weight.detach()


_NARROW = (torch.float16, torch.bfloat16)


def _local_loss(task: _Task, names: str) -> LocalFunction:
    order = names.split()[:3]
    usual = _usual_loss(task)

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits: Any
        target: Any
        if usual is not None and len(args) == 2 and kwargs.get("weight") is None:
            loss = usual(*args)
            if loss is not None:
                return loss
        logits, target, weight = (args[i] if len(args) > i else kwargs.get(n) for i, n in enumerate(order))
        if weight is not None and weight.requires_grad:
            weight = _constant(weight, task)
        if task.reduction == "none":
            return _losses(logits, target, weight, task)
        if task.reduction == "sum":
            return _total(logits, target, weight, task).to(logits.dtype)
        tokens = _counted(target, task) if weight is None and task.kind != "probabilities" else None
        total = _total(logits, target, weight, task)
        mean = total / (tokens.wait() if tokens is not None else _denominator(target, weight, task, total.dtype))
        return mean.to(logits.dtype)

    return local


def _usual_loss(task: _Task) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """The mean cross entropy of a batch-sharded language model, without the generality of the rest.

    torch's kernel counts the valid tokens while it sums their losses. Where other ranks have more of them, that would
    be too late: then they are counted first, so that their sum is under way meanwhile.
    """
    if task.kind != "cross_entropy" or task.class_axes or task.reduction != "mean" or task.smoothing:
        return None
    reducer = reducer_over(task.mesh, tuple(a for a in task.batch_axes if task.mesh.sizes[a] > 1))
    ignore = task.ignore_index

    def usual(logits: Tensor, target: Tensor) -> Tensor | None:
        if target.ndim != 1 or (logits.dtype in _NARROW and not torch.is_autocast_enabled(logits.device.type)):
            return None
        tokens = None if reducer is None else Total(torch.ne(target, ignore).sum(), reducer)
        logarithms = torch.log_softmax(logits, 1)
        total, count = _nll_loss_forward(logarithms, target, None, 2, ignore)  # 2: the sum
        return torch.div(total, count if tokens is None else tokens.wait())

    return usual


# ------------------------------------------------------------------ rules


def _rule(call: Call, names: str) -> Rule | None:
    bound = call.bind(names, ignore_index=-100, reduction="mean", label_smoothing=0.0)
    order = names.split()
    given = [path[0] if isinstance(path[0], str) else order[path[0]] for path in call.paths]
    reduction = bound["reduction"]
    if (
        given != order[: len(given)]
        or len(given) < 2
        or bound["size_average"] is not None
        or bound["reduce"] is not None
    ):
        return None
    if reduction not in ("none", "sum", "mean"):
        return None
    x, t = call.specs[0].shape, call.specs[1].shape
    class_dim = 0 if len(x) == 1 else 1
    if not x:
        return None
    tokens: Shape = (*x[:class_dim], *x[class_dim + 1 :])
    probabilities = x == t and bound["target"].is_floating_point() and "label_smoothing" in order
    if not probabilities and t != tokens:
        return None  # torch's own error, from whole tensors
    kind = "probabilities" if probabilities else "cross_entropy" if "label_smoothing" in order else "nll"
    weighted = (R,) * (len(given) - 2)
    strategies = []
    for dim in range(len(x)):
        if dim == class_dim:
            continue
        out = dim if dim < class_dim else dim - 1
        strategies.append(
            Strategy((dim, dim if probabilities else out, *weighted), (out if reduction == "none" else P,))
        )
    same, total = (R, P) if kind == "nll" else (I, I)  # cross entropy makes the loss whole by itself
    of_classes = (class_dim, class_dim if probabilities else same, *(same,) * len(weighted))
    strategies.append(Strategy(of_classes, (total,), block=True))

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        spec = ins[0]
        axes = [a for a, kind_ in enumerate(spec.types) if is_cut(kind_)]
        if not axes:
            return None
        count = 1
        for n in tokens:
            count *= n
        task = _Task(
            mesh=spec.mesh,
            kind=kind,
            class_dim=class_dim,
            classes=x[class_dim],
            start=spec.local_offset[class_dim],
            class_axes=tuple(a for a in axes if spec.types[a] == class_dim),
            batch_axes=tuple(a for a in axes if spec.types[a] != class_dim),
            tokens=count,
            reduction=reduction,
            ignore_index=bound["ignore_index"],
            smoothing=bound.get("label_smoothing", 0.0),
        )
        return _local_loss(task, names)

    return Rule([() if reduction != "none" else tokens], strategies, localize, uniform=True)


def cross_entropy_rule(call: Call) -> Rule | None:
    """`F.cross_entropy` with class indices or probabilities."""
    return _rule(call, _CROSS_ENTROPY)


def nll_rule(call: Call) -> Rule | None:
    """`F.nll_loss`."""
    return _rule(call, _NLL)


def _quick_cross_entropy(handler: Handler) -> Handler:
    """Look up `F.cross_entropy` without class weights by what decides it; torch passes all parameters by name."""
    known: dict[Any, Entry] = Cache()

    def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            x, target = args
            key = (x._spec, target._spec, kwargs["ignore_index"], kwargs["reduction"], kwargs["label_smoothing"])
            simple = kwargs["weight"] is None and kwargs["size_average"] is None and kwargs["reduce"] is None
        except (AttributeError, KeyError, ValueError):
            return handler(func, args, kwargs)
        e = known.get(key) if simple else None
        if e is not None:
            return execute(e, func, args, kwargs)
        if simple and x._spec.shape != target._spec.shape:  # else the dtype tells indices from probabilities
            try:
                return execute(remember(known, key, miss(func, args, kwargs, cross_entropy_rule)), func, args, kwargs)
            except NoRule:
                return gather_fallback(func, args, kwargs)
        return handler(func, args, kwargs)

    return cross_entropy


TABLE[F.cross_entropy] = _quick_cross_entropy(keyed_handler(cross_entropy_rule, gather_fallback))
TABLE[F.nll_loss] = keyed_handler(nll_rule, gather_fallback)
