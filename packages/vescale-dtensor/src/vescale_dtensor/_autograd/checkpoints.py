"""Activation checkpointing compares saved tensors of both runs; it must see local parts both times.

A result that needs no gradient, such as the indices of `topk`, is kept by the recomputation as the very object that
is labelled afterwards. Its shape would be the local one in the first run and the global one in the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

_Disabled = torch._C.DisableTorchFunctionSubclass


def install() -> None:
    """Make the default check of `torch.utils.checkpoint` look at local parts; may be called again."""
    checks = checkpoint._allowed_determinism_checks_to_fns
    original = checks["default"]
    if hasattr(original, "_vescale_wrapped"):
        return

    def local_metadata(x: Tensor) -> Any:
        with _Disabled():
            return original(x)

    local_metadata._vescale_wrapped = original  # type: ignore[attr-defined]
    checks["default"] = local_metadata
