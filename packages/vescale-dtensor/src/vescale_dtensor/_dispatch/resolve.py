"""Find the handler of a function that no family named."""

from __future__ import annotations

import types
from typing import Any

import torch

from .._tensor import TABLE, DTensor
from ..errors import UnsupportedOperationError
from . import policy
from .call import function_name
from .engine import Handler, tensors_in
from .fallback import enter, gather_fallback, inplace_fallback
from .table import spellings

_RANDOM = frozenset(
    """bernoulli bernoulli_ normal normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_ random_
    poisson binomial multinomial dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout
    feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ native_dropout rand_like randn_like
    randint_like rrelu rrelu_ rrelu_with_noise fractional_max_pool2d fractional_max_pool3d
    _standard_gamma _sample_dirichlet""".split()
)


def resolve(func: Any) -> Handler:
    """Return the handler for `func`: of the same operator under another spelling, else a fallback."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _resolve_overload(func)
    name = function_name(func)
    if name in _RANDOM:
        return _refuse_random
    if isinstance(func, types.FunctionType):
        if (func.__module__ or "").startswith("torch.distributed"):
            return _refuse_collective
        return entering(func)
    return inplace_fallback if _mutates(name) else gather_fallback


def entering(func: types.FunctionType) -> Handler:
    """Handler that runs a Python function of torch; plain tensors that its body makes are alike on all ranks."""
    entered = enter(func)

    def handler(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in tensors_in(args, kwargs):
            if not isinstance(value, DTensor) and value.numel() != 1:
                policy.check_plain(function_name(func), tuple(value.shape))
        policy.state.inside_modules += 1
        try:
            return entered(*args, **kwargs)
        finally:
            policy.state.inside_modules -= 1

    return handler


def _mutates(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    )


def _resolve_overload(func: Any) -> Handler:
    packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace == "aten":
        for spelling in spellings(name):
            if spelling in TABLE:
                return TABLE[spelling]
    if "c10d" in namespace:
        return _refuse_collective
    known = TABLE.get(packet)
    if known is not None:
        return known
    if isinstance(func, torch._ops.OpOverload):
        overloads = [func]
    else:
        overloads = [getattr(packet, o) for o in packet.overloads() if not o.endswith("out")]
    if any(o._schema.is_mutable for o in overloads):
        return _refuse_mutation
    return gather_fallback


def _refuse_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperationError(
        f"{function_name(func)} draws random numbers and has no sharding rule: each rank would draw its own. "
        "Draw on a replicated tensor's to_local() with equal seeds, or register a rule with register_op"
    )


def _refuse_mutation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperationError(
        f"{func} changes its arguments and has no sharding rule; the change would be lost on gathered copies. "
        "Register a rule with register_op(func, rule), or wrap the call in local_map"
    )


def _refuse_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperationError(
        f"torch.distributed.{function_name(func)} got a DTensor: it would act on the local part. "
        "Call redistribute(...) on the DTensor, or pass to_local() if the local part is what you mean"
    )


__all__ = ["entering", "resolve"]
