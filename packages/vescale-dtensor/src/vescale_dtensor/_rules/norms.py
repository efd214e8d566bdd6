"""Norms and distances.

The p-norm of a whole is the p-norm of its parts' p-norms, so a norm over sharded dims sends one
number per rank and result element. `torch.norm`, `Tensor.norm` and `F.normalize` are Python
functions of torch and arrive here through `linalg.vector_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import strip
from .._dispatch.call import Call, Localized, Rewrite, Rule, Strategy, normalize_dim
from .._dispatch.engine import out_variant
from .._dispatch.entry import NoRule
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import keyed, register
from .._spec import Spec
from ..placements import I, R
from ._across import Across, filled
from ._canonical import Reduced, hashable, renamed, rewrite, unary
from .extrema import global_extreme
from .pointwise import broadcast, elementwise_strategies
from .reductions import reduction

_INF = float("inf")


def _vector(
    input: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> tuple[Any, ...]:
    return input, ord, hashable(dim), keepdim, dtype


def vector_norm_rule(call: Call) -> Rule:
    """`linalg.vector_norm`."""
    _, order, dim, keepdim, dtype = call.args
    if not isinstance(order, int | float) or isinstance(order, bool):
        raise NoRule
    red = Reduced(call.shape, dim, keepdim=keepdim)
    if red.count == 0 and (order < 0 or order == _INF):
        raise NoRule  # torch's own error

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        axes = red.axes(ins[0])
        whole = rewrite(torch.linalg.vector_norm, order, None if red.full else red.dims, keepdim, dtype=dtype)
        if not axes:
            return whole
        across, out = Across(call.mesh, axes), outs[0]
        empty = tuple(d for d in red.dims if ins[0].local_shape[d] == 0)

        def extreme(x: Any) -> Tensor:
            size = strip(x if dtype is None else x.to(dtype)).abs()
            return global_extreme(size, red, across, empty, largest=order > 0)

        def combined(x: Any) -> Tensor:
            own = whole.function(filled(x, empty, _INF) if order < 0 else x, *whole.tail)
            parts = across.gather(own, out)
            return parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, 0)

        return Rewrite(extreme if abs(order) == _INF else combined, ())

    return reduction(red, I, localize)


def linalg_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg.norm`: a vector norm or a matrix norm, by its arguments."""
    if kwargs.get("out") is not None:
        return out_variant(linalg_norm, func, args, kwargs)
    try:
        x, order, dim, keepdim, dtype = _norm_arguments(*args, **renamed(kwargs))
    except TypeError:
        return gather_fallback(func, args, kwargs)
    if dim is None and order is not None and x.ndim == 2:
        dim = (0, 1)
    elif dim is None and order is not None and x.ndim != 1:
        return gather_fallback(func, args, kwargs)  # torch's own error
    if order is None or dim is None or isinstance(dim, int) or len(dim) == 1:
        return torch.linalg.vector_norm(x, 2 if order is None else order, dim, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(x, order, dim, keepdim, dtype=dtype)


def _norm_arguments(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return input, ord, dim, keepdim, dtype


def matrix_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg.matrix_norm`: by vector norms and extrema where it can, else whole matrices."""
    if kwargs.get("out") is not None:
        return out_variant(matrix_norm, func, args, kwargs)
    try:
        x, order, dim, keepdim, dtype = _matrix_arguments(*args, **renamed(kwargs))
        rows, columns = (normalize_dim(d, x.ndim) for d in dim)
    except (TypeError, ValueError):
        return gather_fallback(func, args, kwargs)
    if x.ndim < 2 or rows == columns:
        return gather_fallback(func, args, kwargs)
    if order == "fro":
        return torch.linalg.vector_norm(x, 2, (rows, columns), keepdim, dtype=dtype)
    if isinstance(order, int | float) and abs(order) in (1, _INF):
        inner, outer = (rows, columns) if abs(order) == 1 else (columns, rows)
        if x.shape[outer] == 0:
            return gather_fallback(func, args, kwargs)  # torch knows a value for some of these
        sums = torch.linalg.vector_norm(x, 1, inner, True, dtype=dtype)
        found = (torch.amax if order > 0 else torch.amin)(sums, outer, True)
        return found if keepdim else found.squeeze((rows, columns))
    return _spectral(func, (x, order, (rows, columns), keepdim, dtype), {})


def _matrix_arguments(
    input: Any,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    return input, ord, dim, keepdim, dtype


def spectral_norm_rule(call: Call) -> Rule:
    """Norms by singular values: whole matrices, sharded batches."""
    _, order, dim, keepdim, dtype = call.args
    red = Reduced(call.shape, dim, keepdim=keepdim)
    run = rewrite(torch.linalg.matrix_norm, order, dim, keepdim, dtype=dtype)
    return Rule([red.out], [Strategy((d,), (red.place(d),)) for d in red.kept], lambda ins, outs: run)


def dist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dist(x, y, p)`: the norm of the difference."""
    bound = dict(zip(("input", "other", "p"), args, strict=False), **kwargs)
    x = bound.get("input", bound.get("self"))
    return torch.linalg.vector_norm(x - bound["other"], bound.get("p", 2))


def cdist_rule(call: Call) -> Rule | None:
    """`cdist`: rows of either side, and batches, may be sharded."""
    if len(call.specs) != 2 or min(s.ndim for s in call.specs) < 2:
        return None
    left, right = call.specs
    batch = broadcast([left.shape[:-2], right.shape[:-2]])
    shape = (*batch, left.shape[-2], right.shape[-2])
    strategies = elementwise_strategies([left.shape[:-2], right.shape[:-2]], batch)
    strategies += [Strategy((left.ndim - 2, R), (len(shape) - 2,)), Strategy((R, right.ndim - 2), (len(shape) - 1,))]
    return Rule([shape], strategies)


def along_dim_rule(call: Call) -> Rule | None:
    """`cosine_similarity(x, y, dim)`: elementwise but for `dim`, which must be whole."""
    dim = call.arg(2, "dim", 1)
    shapes = [s.shape for s in call.specs]
    if len(shapes) != 2 or not isinstance(dim, int):
        return None
    shape = broadcast(shapes)
    position = normalize_dim(dim, len(shape))
    return _without(call, shape, position, keepdim=False)


def pairwise_distance_rule(call: Call) -> Rule | None:
    """`pairwise_distance`: elementwise but for the last dim, which must be whole."""
    keepdim = call.arg(4, "keepdim", False)
    if len(call.specs) != 2:
        return None
    shape = broadcast([s.shape for s in call.specs])
    return _without(call, shape, len(shape) - 1, keepdim=keepdim) if shape else None


def _without(call: Call, shape: tuple[int, ...], dim: int, *, keepdim: bool) -> Rule:
    red = Reduced(shape, dim, keepdim=keepdim)
    strategies = elementwise_strategies([s.shape for s in call.specs], shape)
    kept = [Strategy(strategies[d].ins, (red.place(d),)) for d in red.kept]
    return Rule([red.out], kept)


def norm_except_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`norm_except_dim(v, pow, dim)`, by which weight norm starts: the vector norm over all other dims."""
    return _norm_except_dim(*args, **kwargs)


def _norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:
    if dim == -1:
        return torch.linalg.vector_norm(v, pow)
    others = [d for d in range(v.ndim) if d != normalize_dim(dim, v.ndim)]
    return torch.linalg.vector_norm(v, pow, others, keepdim=True) if others else v.abs()


def weight_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_weight_norm(v, g, dim)`: v times g over the norm of v."""
    return _weight_norm(*args, **kwargs)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / _norm_except_dim(v, 2, dim))


def _spectral_signature(input: Tensor, ord: Any, dim: Any, keepdim: bool, dtype: Any) -> tuple[Any, ...]:
    return input, ord, dim, keepdim, dtype


_spectral = unary("", _spectral_signature, spectral_norm_rule)
unary("linalg.vector_norm", _vector, vector_norm_rule)
register("linalg.norm", linalg_norm)
register("linalg.matrix_norm", matrix_norm)
register("dist", dist)
register("norm_except_dim", norm_except_dim)
register("_weight_norm", weight_norm)
keyed("cdist", cdist_rule, inplace=False)
keyed("cosine_similarity", along_dim_rule, inplace=False)
keyed("pairwise_distance", pairwise_distance_rule, inplace=False)
