"""Gradient clipping: torch's own functions, with norms of many gradients reduced together.

`clip_grad_norm_` and its kin run unmodified through the rules of `_foreach_norm` and
`_foreach_mul_`. Only without foreach they would reduce one number per gradient; the total norm is then
taken of the list as well, which gives the same value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ._tensor import DTensor


def _batched(total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(total_norm)
    def wrapper(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        if not foreach:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if any(t.__class__ is DTensor for t in tensors):
                foreach = True
        return total_norm(tensors, norm_type, error_if_nonfinite, foreach)

    wrapper._vescale_wrapped = total_norm  # type: ignore[attr-defined]
    wrapper._torchdynamo_inline = total_norm  # type: ignore[attr-defined]  # see `_patching.replace_once`
    return wrapper


def install() -> None:
    """Wrap the total norm under both of its names; may be called again."""
    if hasattr(clip_grad._get_total_norm, "_vescale_wrapped"):
        return
    original = clip_grad._get_total_norm
    clip_grad._get_total_norm = _batched(original)
    for owner in (clip_grad, torch.nn.utils):
        if hasattr(owner, "get_total_norm"):
            owner.get_total_norm = clip_grad._get_total_norm  # type: ignore[attr-defined]
