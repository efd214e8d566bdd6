"""Copies into existing tensors, `.data`, and what pickles and `torch.load` need.

A copy into a DTensor keeps its layout: the source is moved to it. A copy of a DTensor into a plain
tensor is a copy of the whole. `.data = y` takes the layout of `y`, because the storage is exchanged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .. import _mesh, _spec, _tensor
from .._comm.move import forget_casts, move
from .._dispatch import policy
from .._dispatch.copies import before_write
from .._dispatch.engine import tag
from .._dispatch.solve import unwanted
from .._dispatch.table import register
from .._irregular import interleaved, is_cut, ragged
from .._spec import Spec, replicated
from .._tap import alias
from .._tensor import TABLE, DTensor
from ..errors import MeshMismatchError
from ..placements import AxisTypes, I

_run = torch._C._disabled_torch_function_impl
_set_data_slot = Tensor.data.__set__  # type: ignore[attr-defined]
_get_grad_slot = Tensor.grad.__get__  # type: ignore[union-attr]


def aligned(value: Any, target: Spec, name: str) -> DTensor:
    """Return `value`, broadcast to the shape of `target`, under its types; a plain one is the same on every rank.

    Raises:
        MeshMismatchError: `value` lies on another mesh.
        PlainTensorError: `value` is plain, not a scalar, and plain tensors are not taken as replicated here.
    """
    if not isinstance(value, DTensor):
        if value.numel() != 1:
            policy.check_plain(name, tuple(value.shape))
        value = tag(alias(value), replicated(target.mesh, value.shape))
    spec = value._spec
    if spec.mesh is not target.mesh:
        raise MeshMismatchError(
            f"{name}: the source {spec!r} lies on {spec.mesh!r}, the target {target!r} on {target.mesh!r}. "
            "Take full_tensor() of the source and distribute it on the target's mesh"
        )
    if spec.shape != target.shape:
        if spec.numel == 1 and spec.sharded:
            value = move(value, tuple(I if is_cut(t) else t for t in spec.types))
        value = cast(DTensor, value.expand(target.shape))
        spec = value._spec
    if spec.types != target.types:
        _report(name, spec, target.types)
        value = move(value, target.types)
    return cast(DTensor, value)


def _report(name: str, spec: Spec, types: AxisTypes) -> None:
    if policy.state.communication != "allow" and unwanted(spec.mesh, spec.types, types):
        policy.report(name, [(spec, types)])


def copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.copy_(source, non_blocking=False)`."""
    bound: dict[str, Any] = dict(zip(("self", "src", "non_blocking"), args, strict=False))
    bound.update(kwargs)
    target: Any = bound["self"]
    source: Any = bound["src"]
    rest = {"non_blocking": bound["non_blocking"]} if "non_blocking" in bound else {}
    if isinstance(target, DTensor):
        before_write(target, "copy_")
        _run(func, (), (target, aligned(source, target._spec, "copy_")), rest)
        return target
    spec = source._spec
    _report("copy_ into a plain tensor", spec, (I,) * spec.mesh.ndim)
    return func(target, source.full_tensor(), **rest)


def set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x.data = y`: the storage of `y`, and with it its layout, becomes that of `x`."""
    x, y = args
    if not isinstance(y, DTensor):
        policy.check_plain("assigning .data", tuple(y.shape))
        y = aligned(y, _spec.spec_of(x._spec.mesh, y.shape, x._spec.types), "assigning .data")
    _run(_set_data_slot, (), (x, y), {})
    old = x._spec
    if old is not y._spec:
        grad = _run(_get_grad_slot, (), (x,), {})
        kept = None
        if grad is not None and old.shape == y._spec.shape and old.mesh is y._spec.mesh:
            kept = move(grad if isinstance(grad, DTensor) else tag(grad, old.dual), y._spec.dual.types)
        x._spec = y._spec
        if grad is not None:
            _run(Tensor.grad.__set__, (), (x, kept), {})  # type: ignore[union-attr]
    forget_casts(x)


register("copy_", copy_)
TABLE[_set_data_slot] = set_data
# What a pickled DTensor names: torch.load(weights_only=True) accepts it like a plain tensor.
torch.serialization.add_safe_globals([DTensor, _tensor._rebuild, _spec.spec_of, _mesh._restore, interleaved, ragged])
