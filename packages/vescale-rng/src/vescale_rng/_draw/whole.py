"""Random operators without a closed form: the whole result is drawn on every rank, and each keeps its part.

How many numbers they take depends on the data (poisson, rrelu), or their result is not made element by element
(randperm, multinomial). Ranks whose generators are in step draw the same whole result without communication, once the
tensor arguments are there whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedRandomOperatorError
from .unseen import unseen
from .who import who_draws

__all__ = ["WHOLE", "run_whole"]


def _rrelu(
    x: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = True, generator: Any = None
) -> Tensor:
    return (
        torch.rrelu(x, lower, upper, training, generator=generator)
        if generator is not None
        else torch.rrelu(x, lower, upper, training)
    )


def _randperm(n: int, generator: Any = None, dtype: torch.dtype = torch.int64, device: Any = None) -> Tensor:
    return torch.randperm(n, generator=generator, dtype=dtype, device=device)


WHOLE: dict[str, Callable[..., Tensor]] = {
    "poisson": torch.poisson,
    "binomial": torch.binomial,
    "_standard_gamma": torch._standard_gamma,
    "_sample_dirichlet": torch._sample_dirichlet,
    "multinomial": torch.multinomial,
    "randperm": _randperm,
    "rrelu": _rrelu,
}


@unseen
def run_whole(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Tensor:
    """Run an operator on whole tensors, with the numbers that one device would draw.

    Args:
        op: a key of `WHOLE`.
        args: its arguments, tensors among them whole.
        kwargs: named ones, and `generator`.

    Raises:
        UnsupportedRandomOperatorError: if the sampler of `portable` or `emulate_cuda` has no such operator.
        TypeError: if the generator is none.
    """
    named = dict(kwargs or {})
    sampler = who_draws(named.get("generator"))
    if sampler is None or isinstance(sampler, torch.Generator):
        return WHOLE[op](*args, **named)
    draw_whole = getattr(sampler, "whole", None)
    if draw_whole is None:
        raise UnsupportedRandomOperatorError(
            f"{op} is not defined for {type(sampler).__name__}; draw it outside of the block, or give a torch.Generator"
        )
    named.pop("generator", None)
    result: Tensor = draw_whole(op, args, named)
    return result
