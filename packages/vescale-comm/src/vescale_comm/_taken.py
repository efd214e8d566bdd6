"""Which parameters have their gradients reduced by something already; two that do it would count ranks twice.

A wrapper of torch around a module can be seen only where the wrapper itself is given, or is inside of what is given.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .errors import CommError, PlanError

__all__ = ["give_up", "refuse_taken", "take", "taker_of"]

_takers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def take(parameters: Iterable[Tensor], taker: object) -> None:
    """Note that something reduces the gradients of parameters from now on, for as long as it lives.

    Args:
        parameters: the parameters.
        taker: what reduces them.
    """
    reference = weakref.ref(taker)
    for parameter in parameters:
        _takers[parameter] = reference


def give_up(parameters: Iterable[Tensor], taker: object) -> None:
    """Undo `take`."""
    for parameter in parameters:
        if taker_of(parameter) is taker:
            del _takers[parameter]


def taker_of(parameter: Tensor) -> object:
    """Return what reduces the gradient of a parameter; None: nothing that is known here."""
    reference = _takers.get(parameter)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def refuse_taken(call: str, module: nn.Module | None, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose gradients something else reduces already.

    Args:
        call: what is about to reduce them, for the error.
        module: the module, if it is known; what is inside of it counts where it has one of the parameters.
        parameters: names and parameters.

    Raises:
        PlanError: a module is wrapped for data parallelism, or a parameter is a shard, or has such an owner.
    """
    parameters = list(parameters)
    own = {id(parameter) for _, parameter in parameters}
    for name, inner in () if module is None else module.named_modules():
        if _reduces(inner) and not own.isdisjoint(map(id, inner.parameters())):
            raise PlanError(
                f"{name or 'module'}: its {type(inner).__name__} reduces gradients already. {call} does that itself: "
                f"pass the plain module."
            )
    for name, parameter in parameters:
        if hasattr(parameter, "vescale"):
            raise PlanError(
                f"{name}: is a shard of fully_shard already, which reduces its gradients; use an optimizer of torch "
                f"for it, and no {call}."
            )
        taker = taker_of(parameter)
        if taker is not None:
            kind = type(taker).__name__
            what = "replica (of replicate or DistributedDataParallel)" if kind == "Replica" else kind
            raise PlanError(
                f"{name}: {'another' if kind == call else 'a'} {what} reduces its gradients already; close() that one "
                f"first."
            )


def _reduces(module: nn.Module) -> bool:
    """Tell whether a module is one that reduces gradients of all in it."""
    from ._replicate import DistributedDataParallel, replicated

    if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
        return True
    of_torch: Any = sys.modules.get("torch.distributed.fsdp")
    if of_torch is not None and isinstance(module, (of_torch.FSDPModule, of_torch.FullyShardedDataParallel)):
        return True
    with suppress(CommError):  # which is how it tells that it is not
        return replicated(module) is not None
    return False
