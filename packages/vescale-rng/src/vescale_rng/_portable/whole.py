"""Operators whose result is not made element by element: `randperm` and `multinomial`, with portable bits.

Only steps with one possible result are used: sorting with ties in order, integer sums, elementwise float64 arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import RandomError, UnsupportedRandomOperatorError
from .elementary import minus_log_
from .integers import multiply_high

if TYPE_CHECKING:
    from collections.abc import Callable

    Bits = Callable[[int, torch.device], Tensor]

__all__ = ["portable_whole"]

_MASK = 0xFFFFFFFF


def portable_whole(op: str, bits: Bits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Run an operator.

    Args:
        op: "randperm" or "multinomial".
        bits: gives that many random 64-bit numbers (as int64) on a device, from the start of the call.
        args: as of the torch function.
        kwargs: likewise.

    Raises:
        UnsupportedRandomOperatorError: for other operators.
    """
    if op == "randperm":
        return _randperm(bits, *args, **kwargs)
    if op == "multinomial":
        return _multinomial(bits, *args, **kwargs)
    raise UnsupportedRandomOperatorError(
        f"{op} has no portable form (of the operators made as a whole, multinomial and randperm have one); draw it "
        "outside of the block, or with a torch.Generator of its own"
    )


def _randperm(bits: Bits, n: int, *, dtype: torch.dtype = torch.int64, device: Any = None, **_: Any) -> Tensor:
    """The order that sorts n random 64-bit numbers."""
    order = torch.sort(bits(n, torch.device(device or "cpu")), stable=True).indices
    return order.to(dtype)


def _multinomial(bits: Bits, p: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    if p.dim() not in (1, 2) or p.shape[-1] == 0:
        raise RandomError(
            f"multinomial expects p of 1 or 2 dims with at least one category, got shape {tuple(p.shape)}"
        )
    if num_samples <= 0:
        raise RandomError(f"multinomial expects num_samples > 0, got {num_samples}")
    chances = p.detach().to(torch.float64).reshape(-1, p.shape[-1])
    if not bool((chances.isfinite() & (chances >= 0)).all()) or not bool((chances > 0).any(1).all()):
        raise RandomError("multinomial expects finite p >= 0 with a positive number in each row")
    if replacement:
        picked = _with_replacement(bits, chances, num_samples)
    else:
        if num_samples > int((chances > 0).sum(1).min()):
            raise RandomError(f"multinomial: a row has fewer positive p than num_samples={num_samples}")
        picked = _race(bits, chances, num_samples)
    return picked.reshape(*p.shape[:-1], num_samples)


def _with_replacement(bits: Bits, chances: Tensor, num_samples: int) -> Tensor:
    """Cumulative sums of integers, which unlike those of floating-point numbers do not depend on the order of adding.

    The largest chance of a row becomes an integer of 62 bits less those that the sum may need: chances below its
    2**-(62 - log2(categories)) part are never picked.
    """
    rows, categories = chances.shape
    scale = 62 - categories.bit_length()
    # Multiply by a power of two, made from its bits: exact.
    exponent = torch.bitwise_right_shift(chances.amax(1, keepdim=True).view(torch.int64), 52).sub_(scale + 2045).neg_()
    power = exponent.clamp_(max=2046).bitwise_left_shift_(52).view(torch.float64)
    sums = chances.mul(power).to(torch.int64).cumsum(1)
    numbers = bits(rows * num_samples, chances.device).view(rows, num_samples)
    total = sums[:, -1:]
    halves = [(v >> 32 & _MASK, v & _MASK) for v in (numbers, total)]
    return torch.searchsorted(sums, multiply_high(*halves[0], *halves[1]), right=True)


def _race(bits: Bits, chances: Tensor, num_samples: int) -> Tensor:
    """Exponential race: categories in order of falling `p / exponential`."""
    numbers = bits(chances.numel(), chances.device)
    odd = numbers.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1).mul_(2).add_(1)
    score = chances / minus_log_(odd.to(torch.float64), 53).view(chances.shape)
    return torch.sort(score, dim=1, descending=True, stable=True).indices[:, :num_samples].contiguous()
