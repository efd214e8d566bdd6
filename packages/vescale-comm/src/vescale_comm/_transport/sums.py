"""The canonical sum: what every transport computes where it adds in rank order, whatever carries the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "add_in_order", "check_sum", "divide"]

BLOCK = 1 << 16
"""Elements that are summed at a time, so that partial sums stay in the cache; a multiple of every vector length."""

LARGE = 2.0**14
"""Powers of two below it, and above one over it, and one over them are normal numbers of every dtype."""


def add_in_order(
    terms: Sequence[Tensor], out: Tensor, divisor: float = 1, accumulate: torch.dtype | None = None
) -> None:
    """Write `(((terms[0] + terms[1]) + terms[2]) + ...) / divisor`.

    The bits do not depend on how tensors are cut: every element goes through the same operations alone.

    Args:
        terms: at least one, all of one shape and dtype; `out` may be among them, but not overlap with one otherwise.
        out: where the result goes.
        divisor: by which the sum is divided, in the dtype of the sum.
        accumulate: dtype of the sum; None: that of `out`.

    Example:
        >>> out = torch.empty(2)
        >>> add_in_order([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], out, divisor=2)
        >>> out
        tensor([2., 3.])
    """
    dtype = out.dtype if accumulate is None else accumulate
    one_pass = len(terms) <= 2 and divisor == 1 and dtype == out.dtype == terms[0].dtype
    # Partial sums stand in `out`, unless it is a term that is still to come.
    apart = any(term.data_ptr() == out.data_ptr() for term in terms[2:])
    if one_pass or out.device.type != "cpu" or out.dim() != 1 or out.numel() <= BLOCK:
        _add(terms, out, divisor, dtype, torch.empty_like(out) if apart else out)
        return
    block = BLOCK * torch.get_num_threads()
    room = torch.empty(block, dtype=out.dtype) if apart else None
    for start in range(0, out.numel(), block):
        piece = out[start : start + block]
        partial = piece if room is None else room[: piece.numel()]
        _add([term[start : start + block] for term in terms], piece, divisor, dtype, partial)


def _add(terms: Sequence[Tensor], out: Tensor, divisor: float, dtype: torch.dtype, partial: Tensor) -> None:
    if dtype != out.dtype or dtype != terms[0].dtype:
        total = terms[0].to(dtype, copy=True)
        for term in terms[1:]:
            total.add_(term.to(dtype))
        divide(total, divisor)
        out.copy_(total)
        return
    if len(terms) == 1:
        if terms[0] is not out:
            out.copy_(terms[0])
    else:
        total = terms[0]
        for term in terms[1:-1]:
            total = torch.add(total, term, out=partial)
        torch.add(total, terms[-1], out=out)
    divide(out, divisor)


def divide(total: Tensor, divisor: float) -> None:
    """Divide in place; where a product gives the same bits, as for powers of two, it takes a third of the time."""
    if divisor == 1:
        return
    if total.is_floating_point() and math.frexp(divisor)[0] == 0.5 and 1 / LARGE < divisor < LARGE:
        total.mul_(1 / divisor)
    else:
        total.div_(divisor)


def check_sum(dtype: torch.dtype, divisor: float, accumulate: torch.dtype | None) -> None:
    """Refuse sums that cannot be computed, before anything is sent.

    Args:
        dtype: of the buffer.
        divisor: by which the sum is to be divided.
        accumulate: dtype of the sum; None: that of the buffer.

    Raises:
        ValueError: torch cannot add in this dtype, or not divide in it, or the divisor is no usable number.
    """
    total = dtype if accumulate is None else accumulate
    if total.is_floating_point and total.itemsize == 1:
        raise ValueError(
            f"accumulate: torch does not add in {total}; give the dtype of the sum, such as accumulate=torch.float32."
        )
    if not math.isfinite(divisor) or divisor == 0:
        raise ValueError(f"divisor: needs a finite number other than 0; got {divisor}.")
    if divisor != 1 and not (total.is_floating_point or total.is_complex):
        raise ValueError(
            f"divisor: sums in {total} cannot be divided, but got {divisor}; "
            "give a floating-point dtype of the sum (accumulate=), or divide the sums yourself."
        )
