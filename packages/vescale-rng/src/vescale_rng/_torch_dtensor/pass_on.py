"""Handlers that draw nothing: they pass a call on to torch, or refuse it by name.

An operator has one handler for all calls, so the harmless calls of a refused operator (attention without dropout) must
find their way back to the dispatch that they would have had.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from .._draw.composite import is_composite, run_composite
from ..errors import UnsupportedRandomOperatorError

__all__ = ["DISPATCHER_PARTS", "decompose", "pass_on", "previous", "refuse", "unless_it_draws"]

DISPATCHER_PARTS = (
    "unwrap_to_op_info",
    "sharding_propagator",
    "_dispatch_get_local_results_slow_path",
    "wrap",
)
previous: dict[Any, Any] = {}
"""Handlers that were there before ours, by operator."""

_ADVICE = (
    "nothing was drawn. Call it on `x.full_tensor()` with the same generator state on every rank and distribute the "
    "result, or uninstall vescale_rng around the call (its numbers are then not those of one device)"
)


def refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise an error that names the operator."""
    raise UnsupportedRandomOperatorError(
        f"{op} on a DTensor: vescale_rng does not know how to draw it as one device would, and {_ADVICE}"
    )


def decompose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operators that an operator is made of: in inference mode torch dispatches the composite itself."""
    return run_composite(op, args, kwargs)


def unless_it_draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass on a call of attention or of a recurrent network that has no dropout; refuse one that has."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    p = given.get("dropout_p", given.get("dropout", 0.0))
    if p and given.get("train", True):
        raise UnsupportedRandomOperatorError(
            f"{op} on a DTensor with dropout {p}: the fused kernel draws its mask in its own order, and {_ADVICE}. "
            "Attention has a form that is right: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    return pass_on(op, args, kwargs)


def pass_on(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator (not an in-place one) as torch's DTensor would without our handler."""
    handler = previous.get(op)
    if handler is not None:
        return handler(op, args, kwargs)
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError:
        if not is_composite(op):
            raise
        return run_composite(op, args, kwargs)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    sharding: Any = info.output_sharding
    return dispatcher.wrap(results, sharding.output_spec)
