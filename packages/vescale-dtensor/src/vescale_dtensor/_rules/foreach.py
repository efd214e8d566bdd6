"""Functions on lists of tensors: `torch._foreach_*`, `torch._fused_*`, and the scaler's check for infinities.

The first list says where the results lie; all others are moved there, and the function runs once
on lists of local parts. Norms, maxima and sums are combined over the ranks in as many collectives
as there are different sets of sharded mesh axes, not one per tensor. Where that does not apply (a
graph is recorded, shapes broadcast) the elements are done one by one by their own rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.batch import all_reduce_batch
from .._comm.move import move, reduced_types, strip
from .._dispatch.call import function_name
from .._dispatch.copies import before_write
from .._dispatch.engine import tag, tensors_in
from .._irregular import is_cut
from .._mesh import Axes, MeshInfo
from .._spec import Spec, replicated
from .._tensor import TABLE, DTensor, make
from ..errors import UnsupportedOperationError
from ..placements import I, P
from .copying import aligned

_run = torch._C._disabled_torch_function_impl

_SCALES = frozenset(("_foreach_mul_", "_foreach_div_", "_foreach_neg_", "_foreach_zero_"))
"""In-place functions that commute with a pending sum when the other argument is a number."""


# ------------------------------------------------------------------ pending sums


def reduce_pending(values: Sequence[Any]) -> list[Any]:
    """Turn the pending sums among `values` into values, with few collectives; detached. Others are unchanged."""
    pending = [i for i, v in enumerate(values) if isinstance(v, DTensor) and P in v._spec.types]
    out = list(values)
    if pending:
        parts = [strip(values[i].detach()) for i in pending]
        places = [(values[i]._spec.mesh, _axes_of(values[i]._spec, pending=True)) for i in pending]
        for i, part in zip(pending, all_reduce_batch(parts, places), strict=True):
            spec = values[i]._spec
            out[i] = make(part, spec.with_types(reduced_types(spec.types)))
    return out


def _axes_of(spec: Spec, *, pending: bool) -> Axes:
    """Axes that the tensor is a pending sum over, or that shard it."""
    return tuple(a for a, t in enumerate(spec.types) if (t == P if pending else is_cut(t)))


def _wants_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value)


# ------------------------------------------------------------------ elementwise


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise `_foreach_` function, in place or not."""
    name = function_name(func)
    inplace = name.endswith("_")
    first = next((i for i, a in enumerate(args) if _is_list(a)), None)
    if first is None or any(_is_list(v) for v in kwargs.values()):
        names = {
            "self": 0,
            "other": 1,
            "exponent": 1,
            "tensors1": 1,
            "tensor1": 1,
            "tensors2": 2,
            "tensor2": 2,
            "src": 1,
            "weights": 2,
        }
        order = sorted((k for k in kwargs if k in names), key=names.__getitem__)
        rest = {k: v for k, v in kwargs.items() if k not in names}
        return foreach(func, (*args, *[kwargs[k] for k in order]), rest)
    lists = [a for a in args if _is_list(a)]
    if _wants_graph(args, kwargs) or not _fits(lists):
        return _one_by_one(name, args, kwargs, len(args[first]))
    targets = list(args[first])
    if inplace:
        for target in targets:
            before_write(target, name)
    scaling = name in _SCALES and len(lists) == 1
    if any(isinstance(t, DTensor) and P in t._spec.types for t in targets) and not scaling:
        if inplace:
            return _inplace_on_pending(func, args, kwargs, first)
        targets = reduce_pending(targets)
    references = [t._spec if isinstance(t, DTensor) else None for t in targets]
    local_args = [
        [_local(v, s, name) for v, s in zip(targets if i == first else a, references, strict=True)]
        if _is_list(a)
        else _scalar(a)
        for i, a in enumerate(args)
    ]
    local_kwargs = {k: _scalar(v) for k, v in kwargs.items()}
    result = _run(func, (), tuple(local_args), local_kwargs)
    if inplace:
        return args[first] if result is not None else None
    return type(result)(
        r if s is None else tag(r, s if torch.is_grad_enabled() else s.invariant)
        for r, s in zip(result, references, strict=True)
    )


def _fits(lists: Sequence[Any]) -> bool:
    """Whether elements in line have one shape, or stand beside no DTensor, or are plain scalars."""
    for column in zip(*lists, strict=False):
        ours = [t for t in column if isinstance(t, DTensor)]
        if ours and not isinstance(column[0], DTensor):
            return False
        if ours and any(t.shape != column[0].shape and (t.numel() != 1 or isinstance(t, DTensor)) for t in column):
            return False
    return len({len(a) for a in lists}) == 1


def _local(value: Any, reference: Spec | None, name: str) -> Any:
    if reference is None or not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor) and value.numel() == 1:
        return value
    if isinstance(value, DTensor) and value._spec is reference:
        return value
    return aligned(value, reference, name)


def _scalar(value: Any) -> Any:
    """A tensor that every element of a list meets: the whole value."""
    if not isinstance(value, DTensor):
        return value
    return strip(move(cast(DTensor, value.detach()), (I,) * value._spec.mesh.ndim))


def _inplace_on_pending(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: int) -> Any:
    """Compute on reduced copies and write them back as pending sums: the layout of a tensor never changes under it."""
    targets = list(args[first])
    reduced = reduce_pending(targets)
    func(*args[:first], reduced, *args[first + 1 :], **kwargs)
    for target, value in zip(targets, reduced, strict=True):
        if value is not target:
            _run(Tensor.copy_, (), (target, move(value, target._spec.types)), {})
    return None


def _one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
    """Run the function of each element by its own rule."""
    base = name.removeprefix("_foreach_")
    function = getattr(Tensor, base) if base.endswith("_") else getattr(torch, base, None) or getattr(Tensor, base)
    if base.endswith("_") and not isinstance(args[0], list | tuple):
        raise UnsupportedOperationError(f"{name}: the first argument must be the list of tensors to change")

    def element(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, list | tuple) else value

    def call(i: int) -> Any:
        values = [element(a, i) for a in args]
        named = {
            ("value" if k == "scalar" and base.startswith("addc") else k): element(v, i) for k, v in kwargs.items()
        }
        if base.rstrip("_") in ("addcmul", "addcdiv") and len(values) == 4:
            named["value"] = _number(values.pop())
        return function(*values, **named)

    results = [call(i) for i in range(count)]
    return None if base.endswith("_") else tuple(results)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


# ------------------------------------------------------------------ reductions


def _combine(values: Sequence[Tensor], specs: Sequence[Spec | None], op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    nowhere: tuple[MeshInfo | None, Axes] = (None, ())
    places: list[Any] = [nowhere if s is None else (s.mesh, _axes_of(s, pending=False)) for s in specs]
    return all_reduce_batch(values, places, op)


def _label_scalars(values: Sequence[Tensor], specs: Sequence[Spec | None]) -> tuple[Tensor, ...]:
    return tuple(v if s is None else make(v, replicated(s.mesh, ())) for v, s in zip(values, specs, strict=True))


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """`_foreach_norm(tensors, ord=2, dtype=None)` and `_foreach_powsum`: of the whole tensors."""
    bound = dict(zip(("self", "ord", "dtype"), args, strict=False))
    bound.update(kwargs)
    order = float(bound.get("ord", 2))
    dtype = bound.get("dtype")
    powsum = function_name(func) == "_foreach_powsum"
    if _wants_graph(args, kwargs):
        norms = [torch.linalg.vector_norm(t, order, dtype=dtype) for t in bound["self"]]
        return tuple(n**order for n in norms) if powsum else tuple(norms)
    tensors = reduce_pending(bound["self"])
    specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
    parts = [strip(t) if isinstance(t, DTensor) else t for t in tensors]
    out_dtypes = [dtype or (t.abs().dtype if t.is_complex() else t.dtype) for t in parts]
    # Sums of powers of half precision overflow where the norm does not: combined in float32.
    wide = [torch.float32 if d in (torch.float16, torch.bfloat16) else d for d in out_dtypes]
    local = _local_norms(parts, order, wide)
    if math.isinf(order):
        combined = _combine(local, specs, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
    elif order in (0.0, 1.0):
        combined = _combine(local, specs, dist.ReduceOp.SUM)
    else:
        sharded = [s is not None and any(s.mesh.sizes[a] > 1 for a in _axes_of(s, pending=False)) for s in specs]
        powers = [n**order if many else n for n, many in zip(local, sharded, strict=True)]
        sums = _combine(powers, specs, dist.ReduceOp.SUM)
        combined = [p ** (1 / order) if many else p for p, many in zip(sums, sharded, strict=True)]
    if powsum:
        combined = [n if order in (0.0, 1.0) else n**order for n in combined]
    return _label_scalars([n.to(d) for n, d in zip(combined, out_dtypes, strict=True)], specs)


def _local_norms(parts: list[Tensor], order: float, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Norms of local parts; those of no elements are the neutral element of the combination."""
    out: list[Tensor] = [
        p.new_full((), math.inf if order < 0 else 0.0, dtype=d) for p, d in zip(parts, dtypes, strict=True)
    ]
    filled = [i for i, p in enumerate(parts) if p.numel()]
    for dtype in dict.fromkeys(dtypes[i] for i in filled):
        members = [i for i in filled if dtypes[i] == dtype]
        norms = torch._foreach_norm([parts[i] for i in members], order, dtype=dtype)
        for i, norm in zip(members, norms, strict=True):
            out[i] = norm
    return out


def foreach_max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """`_foreach_max(tensors)`: the largest element of each whole tensor."""
    if _wants_graph(args, kwargs):
        return tuple(t.max() for t in args[0])
    tensors = reduce_pending(args[0])
    specs = [t._spec if isinstance(t, DTensor) else None for t in tensors]
    local = []
    for t, s in zip(tensors, specs, strict=True):
        part = t if s is None else strip(t)
        if part.numel() or s is None or s.numel == 0:
            local.append(part.max())
        else:
            least = (
                -math.inf
                if part.is_floating_point()
                else False
                if part.dtype == torch.bool
                else torch.iinfo(part.dtype).min
            )
            local.append(part.new_full((), least))
    # A maximum over ranks would drop a NaN, which torch hands on: its marker is reduced beside it.
    combined = _combine(local, specs, dist.ReduceOp.MAX)
    nans = _combine([n.isnan().to(torch.uint8) for n in local], specs, dist.ReduceOp.MAX)
    combined = [
        torch.where(m.bool(), torch.full_like(c, math.nan), c) if c.is_floating_point() else c
        for c, m in zip(combined, nans, strict=True)
    ]
    return _label_scalars(combined, specs)


# ------------------------------------------------------------------ fused optimizers, gradient scaler


def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_fused_adamw_` and the like: every list is aligned with the parameters, then each rank updates its part."""
    name = function_name(func)
    parameters = args[0]
    for p in parameters:
        if isinstance(p, DTensor) and (P in p._spec.types):
            raise UnsupportedOperationError(
                f"{name}: a parameter is a pending sum ({p._spec!r}); redistribute it to Replicate() first"
            )
    references = [p._spec if isinstance(p, DTensor) else None for p in parameters]

    def local(value: Any, position: int) -> Any:
        if not _is_list(value):
            return _scalar(value)
        values = reduce_pending(value)
        for before, after in zip(value, values, strict=True):
            if before is not after and position != 1:
                raise UnsupportedOperationError(f"{name}: an optimizer state is a pending sum ({before._spec!r})")
        moved = [v if isinstance(v, Tensor) and v.numel() == 1 and not isinstance(v, DTensor) else _local(v, r, name)
                 for v, r in zip(values, references, strict=True)]  # fmt: skip
        if position > 1 and any(isinstance(v, DTensor) and m is not v for v, m in zip(value, moved, strict=True)):
            raise UnsupportedOperationError(f"{name}: an optimizer state does not lie as its parameter does")
        return moved

    with torch.no_grad():
        return _run(
            func, (), tuple(local(a, i) for i, a in enumerate(args)), {k: local(v, 2) for k, v in kwargs.items()}
        )


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`: one rank's infinity is everyone's."""
    grads, found_inf, inv_scale = args
    reduced = reduce_pending(grads)
    meshes = dict.fromkeys(g._spec.mesh for g in grads if isinstance(g, DTensor))
    found, scale = _scalar(found_inf), _scalar(inv_scale)
    _run(func, (), (reduced, found, scale), {})
    for grad, value in zip(grads, reduced, strict=True):
        if value is not grad:
            _run(Tensor.copy_, (), (grad, move(value, grad._spec.types)), {})
    for mesh in meshes:
        found.copy_(all_reduce_batch([found], [(mesh, tuple(range(mesh.ndim)))], dist.ReduceOp.MAX)[0])


# ------------------------------------------------------------------ tables

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": foreach_norm,
    "_foreach_powsum": foreach_norm,
    "_foreach_max": foreach_max,
}


def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(torch.mm(a, b) for a, b in zip(args[0], args[1], strict=True))


for _name in dir(torch):
    if _name.startswith("_foreach_"):
        TABLE[getattr(torch, _name)] = _mm if _name == "_foreach_mm" else _REDUCTIONS.get(_name, foreach)
    elif _name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        TABLE[getattr(torch, _name)] = fused
TABLE[torch._amp_foreach_non_finite_check_and_unscale_] = unscale

__all__ = ["foreach", "reduce_pending"]
