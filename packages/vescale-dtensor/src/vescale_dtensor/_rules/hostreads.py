"""Reading values into Python: `item`, `tolist`, `bool`, `numpy`, `equal` and their kin.

Every rank gets the value of the whole tensor: pending sums are reduced, shards gathered, so every
rank of the mesh must read alike. `numpy` shares memory with the tensor and therefore refuses
where the local part is not the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.move import move, reduced_types, strip
from .._comm.record import note
from .._dispatch.call import function_name
from .._dispatch.table import register
from .._irregular import is_cut
from .._mesh import Axes, MeshInfo
from .._spec import Spec
from .._tensor import TABLE, DTensor
from ..errors import UnsupportedOperationError
from ..placements import I, P
from .copying import aligned

_run = torch._C._disabled_torch_function_impl


def whole(x: Any) -> Any:
    """The whole tensor, plain and without a graph; anything else unchanged."""
    if not isinstance(x, DTensor):
        return x
    return strip(move(cast(DTensor, x.detach()), (I,) * x._spec.mesh.ndim))


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(whole(args[0]), *args[1:], **kwargs)


def _read_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read a one-element tensor; a larger one raises torch's error without communication."""
    x = args[0]
    if isinstance(x, DTensor) and x._spec.numel != 1:
        return func(
            torch.empty(x._spec.shape, dtype=x.dtype, device="meta").new_zeros(min(x._spec.numel, 2), device="cpu")
        )
    return func(whole(x), *args[1:], **kwargs)


def _is_whole(spec: Spec) -> bool:
    return all(not (t == P or is_cut(t)) or size == 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True))


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _is_whole(x._spec):
        raise UnsupportedOperationError(
            f"{function_name(func)}: an array shares memory with its tensor, and this rank holds a part of {x._spec!r} "
            f"on {x._spec.mesh!r}. Use full_tensor().numpy() for the whole, or to_local().numpy() for this rank's part"
        )
    return func(strip(x), *args[1:], **kwargs)


def _contains(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x, element = args
    if not isinstance(x, DTensor):
        return bool(whole(element) in x)
    if not isinstance(element, Tensor | int | float | complex | bool):
        raise RuntimeError(f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(element)}.")
    x = cast(DTensor, x.detach())
    x = move(x, reduced_types(x._spec.types))
    if isinstance(element, Tensor) and element.numel() != 1:
        return bool(whole(element) in whole(x))
    found = _run(Tensor.eq, (), (strip(x), whole(element)), {}).any()
    return not agree(not bool(found), x._spec)


def agree(ok: bool, spec: Spec) -> bool:
    """Whether `ok` holds on every rank that holds another part of a tensor of `spec`."""
    mesh = spec.mesh
    axes: Axes = tuple(a for a, t in enumerate(spec.types) if is_cut(t) and mesh.sizes[a] > 1)
    return ok if not axes else _all_true(ok, mesh, axes)


def _all_true(ok: bool, mesh: MeshInfo, axes: Axes) -> bool:
    flag = torch.tensor([int(ok)], device=mesh.device_type)
    note("all_reduce", 8, mesh, axes)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=mesh.group(axes))
    return bool(flag.item())


def _comparison(local: Callable[..., bool]) -> Callable[..., bool]:
    """Handler of a comparison of two whole tensors that is true where it is true of all parts."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        kwargs = dict(kwargs)
        left = args[0] if args else kwargs.pop("input", kwargs.pop("self", None))
        right = args[1] if len(args) > 1 else kwargs.pop("other")
        ours = left if isinstance(left, DTensor) else right
        types = reduced_types(ours._spec.types)
        if left.shape != right.shape:
            if local is torch.equal:
                return False
            return bool(func(whole(left), whole(right), *args[2:], **kwargs))
        target = ours._spec.with_types(types)
        parts = [strip(aligned(t.detach(), target, function_name(func))) for t in (left, right)]
        return agree(bool(local(*parts, *args[2:], **kwargs)), target)

    return handler


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


register("tolist", _read)
register("item is_nonzero __bool__ __int__ __float__ __index__ __complex__ _local_scalar_dense", _read_scalar)
register("numpy __array__", _numpy)
register("equal", _comparison(torch.equal))
register("allclose", _comparison(torch.allclose))
register("is_same_size", _same_size)
TABLE[Tensor.__contains__] = _contains
