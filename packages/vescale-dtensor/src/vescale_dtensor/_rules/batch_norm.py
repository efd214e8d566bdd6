"""Batch norm with the statistics of the whole batch, and instance norm.

In training the statistics span all ranks that shard the batch (what `SyncBatchNorm` computes), so
a sharded batch gives the single device's numbers; running statistics are updated alike everywhere.
Written with distributed operations, whose gradients are right by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._comm.move import move, reduced_types
from .._dispatch import policy
from .._dispatch.call import Call, Localized, Rule, Strategy, first_dtensor
from .._dispatch.engine import Handler
from .._dispatch.entry import RuleFunction
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._spec import Spec, replicated
from .._tensor import DTensor, make
from ..errors import UnsupportedOperationError
from ..placements import I, R
from ._across import on_empty_shard
from ._canonical import several

_HALF = (torch.float16, torch.bfloat16)


def _arguments(
    input: Tensor,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> tuple[Any, ...]:
    return input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled


def _instance_arguments(
    input: Tensor,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> tuple[Any, ...]:
    return input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled


def _channel_rule(function: Any, free: Callable[[int], Sequence[int]]) -> RuleFunction:
    """Rule where dims of `free(ndim)` may be sharded with whole parameters, and channels with sharded ones."""

    def rule(call: Call) -> Rule | None:
        if call.ndim < 2 or any(s.ndim != 1 for s in call.specs[1:]):
            return None
        others = len(call.specs) - 1
        strategies = [Strategy((d, *(R,) * others), (d,)) for d in free(call.ndim)]
        strategies.append(Strategy((1, *(0,) * others), (1,), even=((0, 1),)))  # none empty, which torch refuses

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            if min(ins[0].local_shape) > 0:
                return None
            return lambda _, args, kwargs: on_empty_shard(function, ins[0], outs)(*args, **kwargs)

        return Rule([tuple(call.shape)], strategies, localize)

    return rule


_batch_local: Handler = several(
    "", _arguments, _channel_rule(torch.batch_norm, lambda ndim: [d for d in range(ndim) if d != 1]), torch.batch_norm
)
_instance_local: Handler = several(
    "", _instance_arguments, _channel_rule(torch.instance_norm, lambda ndim: [0]), torch.instance_norm
)


def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.batch_norm`."""
    canonical = _arguments(*args, **kwargs)
    x, weight, bias, running_mean, running_var, training, momentum, eps, _ = canonical
    tensors = [t for t in (x, weight, bias, running_mean, running_var) if isinstance(t, Tensor)]
    everywhere = all(set(t._spec.types) <= {I} for t in tensors if isinstance(t, DTensor))
    if not training or everywhere or x.ndim < 2:
        return _batch_local(func, canonical, {})
    x = _distributed(x, tensors)
    dims = [d for d in range(x.ndim) if d != 1]
    y, mean, variance = _normalized(x, dims, eps)
    count = math.prod(x.shape[d] for d in dims)
    _update(running_mean, mean, momentum)
    _update(running_var, variance, momentum, scale=count / (count - 1) if count > 1 else math.nan)
    return _affine(y, weight, bias).to(x.dtype)


def instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.instance_norm`."""
    canonical = _instance_arguments(*args, **kwargs)
    x, weight, bias, running_mean, running_var, own_statistics, momentum, eps, cudnn = canonical
    if not own_statistics:
        return batch_norm(func, (x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn), {})
    tensors = [t for t in (x, weight, bias, running_mean, running_var) if isinstance(t, Tensor)]
    everywhere = all(set(t._spec.types) <= {I} for t in tensors if isinstance(t, DTensor))
    spatial = isinstance(x, DTensor) and any(d > 1 for d in x._spec.sharded)
    if everywhere or (running_mean is None and running_var is None and not spatial) or x.ndim < 3:
        return _instance_local(func, canonical, {})
    x = _distributed(x, tensors)
    dims = list(range(2, x.ndim))
    y, mean, variance = _normalized(x, dims, eps)
    count = math.prod(x.shape[d] for d in dims)
    _update(running_mean, mean, momentum)
    _update(running_var, variance, momentum, scale=count / (count - 1) if count > 1 else math.nan)
    return _affine(y, weight, bias).to(x.dtype)


def _distributed(x: Any, tensors: list[Tensor]) -> DTensor:
    """The input as a DTensor without pending sums."""
    if not isinstance(x, DTensor):
        policy.check_plain("batch_norm", tuple(x.shape))
        owner = first_dtensor(tensors)
        assert owner is not None
        x = make(x, replicated(owner._spec.mesh, x.shape))
    return move(x, reduced_types(x._spec.types))


def _normalized(x: Any, dims: list[int], eps: float) -> tuple[Any, Any, Any]:
    """`x` normalized over `dims`, with its mean and variance."""
    wide = x.float() if x.dtype in _HALF else x
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return (wide - mean) * torch.rsqrt(variance + eps), mean, variance


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            y = apply(y, parameter.view(1, -1, *(1,) * (y.ndim - 2)))
    return y


def _update(running: Any, statistic: Any, momentum: float, *, scale: float = 1.0) -> None:
    """Move running statistics towards those of this batch, in place, on every rank alike."""
    if running is None:
        return
    with torch.no_grad():
        per_channel = statistic.detach().mean([d for d in range(statistic.ndim) if d != 1]) * scale
        if isinstance(running, DTensor):
            value = move(per_channel, running._spec.types)
        else:
            policy.check_plain("batch_norm", tuple(running.shape))
            value = per_channel.full_tensor()
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def native_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm`: gathers; where it would update sharded running statistics, the update would be lost."""
    names = "input weight bias running_mean running_var training".split()
    bound = dict(zip(names, args, strict=False), **kwargs)
    for name in ("running_mean", "running_var"):
        running = bound.get(name)
        if bound.get("training") and isinstance(running, DTensor) and set(running._spec.types) - {I, R}:
            raise UnsupportedOperationError(
                f"native_batch_norm would update {name} = {running._spec!r} on a gathered copy, and the "
                "update would be lost; use torch.nn.functional.batch_norm"
            )
    return gather_fallback(func, args, kwargs)


register("native_batch_norm", native_batch_norm)
register("torch.batch_norm", batch_norm)
register("torch.instance_norm", instance_norm)
