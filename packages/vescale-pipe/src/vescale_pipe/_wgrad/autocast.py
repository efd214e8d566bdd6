"""What autocast does to the operands of a product, done by hand, to know which uses of a weight share a cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kept import Kept

__all__ = ["any_autocast", "cast_input", "cast_weight", "lower_dtype"]

any_autocast = torch._C._is_any_autocast_enabled
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_probes: dict[torch.device, Tensor] = {}


def lower_dtype(device: str) -> torch.dtype | None:
    """Return what products are cast to on a device; None where autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_input(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return an input as autocast hands it on; None if autocast would remember it, as it does with leaves."""
    if x.dtype is dtype or x.dtype not in _FLOATS:
        return x
    return None if x.requires_grad and x.is_leaf else x.to(dtype)


def cast_weight(kept: Kept, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return a weight as autocast hands it on, without graph, and the cast's number if other uses share it.

    Args:
        kept: remembers casts.
        weight: the weight.
        dtype: what to.

    Returns:
        The weight, and 0 or minus the number of the cast: all uses in one region of autocast share one.
    """
    if weight.dtype is dtype or weight.dtype not in _FLOATS:
        return weight.detach(), 0
    if weight.dtype is not torch.float32 or not weight.is_leaf or not torch.is_autocast_cache_enabled():
        return weight.detach().to(dtype), 0
    key = (id(weight), dtype, _region(weight.device))
    found = kept.casts.get(key)
    if found is None:
        found = kept.casts[key] = (weight.detach().to(dtype), -kept.count())
    return found


def _region(device: torch.device) -> Any:
    """Return what stands for the region of autocast: the node of a cast that its cache holds as long as it lasts."""
    probe = _probes.get(device)
    if probe is None:
        probe = _probes[device] = torch.ones(1, 1, device=device, requires_grad=True)
    # The product of the probe with itself: autocast casts the probe once per region, both factors are that cast.
    return torch.mm(probe, probe).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
