"""One step of a reduction, as the C++ of the backends computes it: two numbers become one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["OPERATIONS", "combine", "numbers", "operation"]

OPERATIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


def operation(op: Any) -> str:
    """Return the name in `OPERATIONS` of a `ReduceOp` of torch, or of a name.

    Raises:
        ValueError: it is none of them.
    """
    for name in OPERATIONS:
        if op == name or (not isinstance(op, str) and op == getattr(dist.ReduceOp, name.upper())):
            return name
    raise ValueError(f"op: {op} is no reduction; it must be one of {', '.join(OPERATIONS)}, or a ReduceOp of torch.")


def numbers(tensor: Tensor) -> Tensor:
    """Return the numbers that a backend adds, as a flat tensor: complex ones are pairs, truth values bytes."""
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    elif flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    return flat.reshape(-1)


def combine(op: str, local: Tensor, received: Tensor) -> Tensor:
    """Return what a rank makes of its own numbers and of those that reach it.

    The order of the two matters for minimum and maximum only, where one is not a number or both are zeros of
    different sign: there it is that of `std::min` and `std::max`, which keep the local one.

    Args:
        op: a name in `OPERATIONS`.
        local: numbers of this rank.
        received: numbers from another one, of the same shape and dtype.
    """
    if op in ("sum", "avg", "premul_sum"):
        return local + received
    if op == "product":
        return local * received
    if op == "min":
        return torch.where(received < local, received, local)
    if op == "max":
        return torch.where(local < received, received, local)
    if op == "band":
        return local & received
    if op == "bor":
        return local | received
    return local ^ received
