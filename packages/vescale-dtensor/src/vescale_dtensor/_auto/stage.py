"""The stage of a rehearsal: new tensors have no data, plain ones are alike on all ranks, nobody warns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import DeviceContext

from .._dispatch import policy
from .._dispatch.table import lookup
from .._tensor import DTensor

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Stage(DeviceContext):
    """Makes tensors on the meta device, and keeps attention fused, which has no such kernel there.

    Where the model asks whether something holds of its data, which are not there, it does not.

    Args:
        answers: what holds, in the order of the questions.

    Attributes:
        guesses: how often there was no answer.
    """

    def __init__(self, answers: Sequence[bool] = ()) -> None:
        super().__init__(torch.device("meta"))
        self.guesses = 0
        self._answers = iter(answers)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].dtype == torch.bool:  # is a mask of ones, say: as if it were not
            answer = next(self._answers, None)
            self.guesses += answer is None
            return bool(answer)
        if func is F.scaled_dot_product_attention:
            operands = (*args, *(kwargs or {}).values())
            if any(t.__class__ is DTensor for t in operands):  # its rule, then the local parts
                return lookup(func)(_attention, args, kwargs or {})
            return _attention(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of local parts."""
    learned = attn_mask is not None and attn_mask.requires_grad  # the fused kernel has no gradient for it
    if learned or query.ndim != 4 or query.shape[-1] != value.shape[-1] or dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    out: Tensor = _fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


_attention.__name__ = "scaled_dot_product_attention"  # what it stands for


@contextlib.contextmanager
def on_stage(answers: Sequence[bool] = ()) -> Iterator[_Stage]:
    """What holds while a skeleton runs; `answers` to what it asks of its data."""
    stage = _Stage(answers)
    before = policy.state.communication
    policy.state.communication = "allow"
    policy.state.inside_modules += 1
    try:
        with stage, torch.enable_grad():
            yield stage
    finally:
        policy.state.inside_modules -= 1
        policy.state.communication = before
