"""State of the compressors of buckets, by names of parameters, and merged over ranks.

What a rank owes is its own. Of the sum over ranks only the result tells something, so that sum, divided as results are,
is what can be saved once and be given to any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .._transport import Transport
from ..errors import MismatchError
from .base import RESIDUAL

__all__ = ["HasCompressor", "State", "give_state", "load_merged", "merge", "state_of"]

State = dict[str, dict[str, Any]]


class HasCompressor(Protocol):
    """A bucket."""

    compressor: Any
    """Its compressor, or None."""
    transport: Transport
    """Over the ranks."""
    divisor: float
    """Of the sums."""

    @property
    def names(self) -> list[str]:
        """Of the parameters."""


def state_of(buckets: Sequence[HasCompressor], merged: bool = False) -> State:
    """Return the state of all compressors by name of the parameter; tensors share memory, unless merged.

    Args:
        buckets: of one model.
        merged: return the same state on all ranks; all must call it then.
    """
    found: State = {}
    for bucket in buckets:
        if bucket.compressor is not None:
            state = bucket.compressor.state_dict()
            found.update(merge(state, bucket.transport, bucket.divisor) if merged else state)
    return found


def give_state(buckets: Sequence[HasCompressor], state: Mapping[str, Mapping[str, Any]], merged: bool = False) -> None:
    """Hand out a state to the compressors; parameters that it does not name start from nothing.

    Args:
        buckets: of one model.
        state: from `state_of`.
        merged: whether it was merged.

    Raises:
        MismatchError: it names a parameter that no compressed bucket has, or does not fit.
    """
    left = dict(state)
    for bucket in buckets:
        if bucket.compressor is not None:
            own: Mapping[str, Mapping[str, Any]] = {name: left.pop(name) for name in bucket.names if name in left}
            if merged:
                own = load_merged(own, bucket.transport.size, bucket.divisor)
            bucket.compressor.load_state_dict(own)
    if left:
        raise MismatchError(f"state: {', '.join(sorted(left)[:5])} are no parameters whose gradients are compressed.")


def merge(state: Mapping[str, Mapping[str, Any]], transport: Transport, divisor: float) -> State:
    """Return a state that is the same on all ranks; all must call it.

    Args:
        state: of this rank, from `state_dict`.
        transport: over the ranks.
        divisor: of the sums.

    Returns:
        The state, with what all ranks together owe, in terms of the result.
    """
    merged: State = {}
    for name, values in state.items():
        merged[name] = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()
        }
        if RESIDUAL in values:
            transport.all_reduce(merged[name][RESIDUAL].view(-1), divisor=divisor).wait()
    return merged


def load_merged(state: Mapping[str, Mapping[str, Any]], size: int, divisor: float) -> State:
    """Return the state of one rank, for `load_state_dict`.

    Args:
        state: from `merge`, of any number of ranks.
        size: number of ranks that there are now.
        divisor: of their sums.
    """
    return {
        name: {key: value * (divisor / size) if key == RESIDUAL else value for key, value in values.items()}
        for name, values in state.items()
    }
