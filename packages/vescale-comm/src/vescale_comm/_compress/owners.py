"""State of compressors of a model or optimizer, to be saved beside its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .saved import HasCompressor, State, give_state, state_of

__all__ = ["compressor_state_dict", "load_compressor_state_dict"]


def compressor_state_dict(owner: Any, *, merged: bool = False) -> State:
    """Return what the compressors of gradients remember; to be called between steps.

    Args:
        owner: a `DistributedDataParallel`, a module after `replicate`, or a `DistributedOptimizer`.
        merged: return one state for all ranks, which any number of ranks can load; all must call it. What is owed is
            then shared out evenly. Without it, the state is that of this rank alone, shares memory, and goes on bit for
            bit.

    Returns:
        By name of the parameter: "residual", what was not sent, in the shape of the gradient on this rank; other keys
        as the compressor has them. Empty where nothing is compressed.
    """
    return state_of(_buckets_of(owner), merged)


def load_compressor_state_dict(owner: Any, state: Mapping[str, Mapping[str, Any]], *, merged: bool = False) -> None:
    """Have the compressors go on from a state; parameters that it does not name start from nothing.

    Args:
        owner: a `DistributedDataParallel`, a module after `replicate`, or a `DistributedOptimizer`.
        state: from `compressor_state_dict`.
        merged: whether it was merged.

    Raises:
        MismatchError: it names a parameter whose gradient is not compressed, or does not fit.
    """
    give_state(_buckets_of(owner), state, merged)


def _buckets_of(owner: Any) -> Sequence[HasCompressor]:
    from .._optimizer import DistributedOptimizer
    from .._replicate import DistributedDataParallel, replicated

    if isinstance(owner, DistributedDataParallel):
        return owner.replica.reducer.buckets
    if isinstance(owner, DistributedOptimizer):
        return owner._buckets.reducer.buckets
    if isinstance(owner, nn.Module):
        return replicated(owner).reducer.buckets
    raise TypeError(
        f"owner: needs a DistributedDataParallel, a replicated module or a DistributedOptimizer; got {type(owner)}."
    )
