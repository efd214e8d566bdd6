"""Variances and standard deviations, exact over sharded and uneven dims.

Over a sharded dim they are computed in two passes, mean then squared deviations, with one small
all-reduce each. The deviations are from the global mean, so nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import strip
from .._dispatch.call import Call, Localized, Rewrite, Rule
from .._dispatch.entry import RuleFunction
from .._spec import Spec
from ..placements import I
from ._across import Across
from ._canonical import Reduced, hashable, rewrite, unary
from .reductions import reduction

_HALF = (torch.float16, torch.bfloat16)


def _signature(
    input: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Any, ...]:
    if dim.__class__ is bool:  # var(x, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 0 if unbiased is False else 1
    elif unbiased is not None:
        raise TypeError
    return input, hashable(dim), correction, keepdim


def variance_and_mean(x: Tensor, red: Reduced, across: Across, correction: float) -> tuple[Tensor, Tensor]:
    """Global variance and mean of a plain local part over `red.dims`, the same on every rank."""
    dtype = x.dtype
    x = x.float() if dtype in _HALF else x
    mean = across.total(x.sum(red.dims, keepdim=True)) / red.count
    deviation = x - across.vary(mean)
    square = (deviation * deviation.conj()).real if deviation.is_complex() else deviation.square()
    variance = across.total(square.sum(red.dims, keepdim=red.keepdim)) / max(red.count - correction, 0.0)
    if not red.keepdim:
        mean = mean.squeeze(red.dims)
    return (variance.to(dtype), mean.to(dtype)) if dtype in _HALF else (variance, mean)


def _root(variance: Tensor) -> Tensor:
    """Square root whose gradient is zero where it is zero, as that of `std`."""
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _rule(function: Any, *, root: bool, with_mean: bool) -> RuleFunction:
    def rule(call: Call) -> Rule:
        _, dim, correction, keepdim = call.args
        red = Reduced(call.shape, dim, keepdim=keepdim)

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return rewrite(function, None if red.full else red.dims, correction=correction, keepdim=keepdim)
            across = Across(call.mesh, axes)

            def local(x: Any) -> Any:
                variance, mean = variance_and_mean(strip(x), red, across, correction)
                spread = _root(variance) if root else variance
                return (spread, mean) if with_mean else spread

            return Rewrite(local, ())

        return reduction(red, I, localize, num_outs=2 if with_mean else 1)

    return rule


unary("var", _signature, _rule(torch.var, root=False, with_mean=False), quick=False)
unary("std", _signature, _rule(torch.std, root=True, with_mean=False), quick=False)
unary("var_mean", _signature, _rule(torch.var_mean, root=False, with_mean=True), quick=False)
unary("std_mean", _signature, _rule(torch.std_mean, root=True, with_mean=True), quick=False)
