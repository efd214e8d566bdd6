"""`cov` and `corrcoef`, by the operations that they are made of: a product over the observations, sharded or not."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .._dispatch.engine import out_variant
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._tensor import DTensor


def _weights(frequencies: Any, importance: Any) -> Any:
    given = [w for w in (frequencies, importance) if w is not None]
    return None if not given else given[0] if len(given) == 1 else given[0] * given[1]


def cov(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cov(input, correction, fweights, aweights)` of variables in rows and observations in columns."""
    if kwargs.get("out") is not None:
        return out_variant(cov, func, args, kwargs)
    bound = {"correction": 1, **dict(zip(("input",), args, strict=False)), **kwargs}
    x, correction, importance = bound.get("input", bound.get("self")), bound["correction"], bound.get("aweights")
    weights = _weights(bound.get("fweights"), importance)
    if not isinstance(x, DTensor) or x.ndim > 2 or not x.numel() or x.dtype == torch.bool or len(args) > 1:
        return gather_fallback(func, args, kwargs)
    if weights is not None and (weights.ndim != 1 or weights.numel() != (x.shape[-1] if x.ndim else 1)):
        return gather_fallback(func, args, kwargs)  # torch's own error
    rows: Any = x if x.ndim == 2 else x.reshape(1, -1)
    total: Any = rows.shape[1] if weights is None else weights.sum()
    mean = (rows if weights is None else rows * weights).sum(1, keepdim=True) / total
    if importance is None or not correction:
        degrees = total - correction
    else:
        degrees = total - correction * (weights * importance).sum() / total
    if isinstance(degrees, torch.Tensor):
        degrees = torch.where(degrees < 0, 0, degrees)
    elif degrees <= 0:
        warnings.warn("cov(): degrees of freedom is <= 0", UserWarning, stacklevel=3)
        degrees = 0
    deviation = rows - mean
    weighted = deviation if weights is None else deviation * weights
    return (torch.mm(deviation, weighted.t().conj()) / degrees).squeeze()


def corrcoef(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`corrcoef(input)`: the covariance scaled by both standard deviations."""
    x = args[0] if args else kwargs["input"]
    if x.ndim > 2 or not x.numel():
        return gather_fallback(func, args, kwargs)
    c = torch.cov(x)
    if c.ndim == 0:
        return c / c
    variance = c.diagonal()
    deviation = (variance.real if c.is_complex() else variance).sqrt()
    scaled = c / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if scaled.is_complex():
        return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
    return scaled.clip(-1, 1)


register("cov", cov)
register("corrcoef", corrcoef)
