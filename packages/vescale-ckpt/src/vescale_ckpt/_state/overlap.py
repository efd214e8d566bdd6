"""Tensors of which elements share memory: they cannot be filled, for the last value that is written wins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["shares_elements"]


def shares_elements(view: Tensor) -> bool:
    """Tell whether two elements of a strided tensor lie in the same place.

    Args:
        view: expanded, windows that overlap, or any other tensor.

    Example:
        >>> shares_elements(torch.zeros(3).expand(2, 3)), shares_elements(torch.zeros(5).unfold(0, 3, 1))
        (True, True)
        >>> shares_elements(torch.zeros(4, 6)[::2, ::3].T)
        False
    """
    dims = sorted((step, size) for step, size in zip(view.stride(), view.shape, strict=True) if size > 1)
    if view.numel() == 0 or _nested(dims):
        return False
    if any(step == 0 for step, _ in dims):
        return True
    places = torch.zeros(1, dtype=torch.int64)
    for step, size in dims:
        places = (places.unsqueeze(1) + torch.arange(size) * step).flatten()
    places = places.sort().values
    return bool((places[1:] == places[:-1]).any())


def _nested(dims: Sequence[tuple[int, int]]) -> bool:
    """Tell whether each stride leaps over all that the smaller ones reach, so that no two elements meet."""
    reach = 0
    for step, size in dims:
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True
