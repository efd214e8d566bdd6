"""`no_sync` for whatever keeps gradients in step: one name for all strategies."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress

import torch
from torch import nn

from . import _fsdp
from ._optimizer import DistributedOptimizer
from ._replicate import DistributedDataParallel, replicated
from .errors import CommError

__all__ = ["no_sync"]


def no_sync(kept: nn.Module | torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Only add up gradients on this rank in backwards that run inside; the next one outside reduces all of them.

    Args:
        kept: a module after `replicate` or `fully_shard`, a `DistributedDataParallel`, or a `DistributedOptimizer`.

    Returns:
        A context; all ranks enter and leave it at the same steps.

    Raises:
        CommError: nothing reduces gradients of this module, or not through it.
    """
    if isinstance(kept, DistributedDataParallel | DistributedOptimizer):
        return kept.no_sync()
    if not isinstance(kept, nn.Module):
        raise CommError(
            f"no_sync: this {type(kept).__name__} reduces no gradients; pass the DistributedOptimizer, or the module "
            "that was given to replicate or fully_shard."
        )
    for context in (_fsdp.no_sync, _of_replica):
        with suppress(CommError):  # it is not one of these
            return context(kept)
    raise CommError(
        f"no_sync: this {type(kept).__name__} was given neither to replicate nor to fully_shard; with a "
        "DistributedOptimizer pass the optimizer."
    )


def _of_replica(module: nn.Module) -> AbstractContextManager[None]:
    return replicated(module).no_sync()
