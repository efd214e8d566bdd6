"""Making DTensors: from whole tensors, from local parts, and from nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._comm.move import run_plan
from ._comm.objects import gather_objects
from ._comm.plan import plan
from ._deferred import deferred_local, is_deferred, require_outside, whole_on
from ._irregular import Ragged, cut_dims_of, is_cut
from ._mesh import MeshInfo, mesh_info
from ._order import in_order
from ._spec import Spec, replicated, spec_of
from ._tensor import DTensor, make
from .placements import AxisTypes, I, Placement, R, duals, short, to_axis_types, to_placement

__all__ = ["distribute_tensor", "from_local"]


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Distribute a tensor that every rank holds in full; returns a leaf, a Parameter for a Parameter.

    Args:
        tensor: the whole tensor, the same on every rank. A leaf; its `requires_grad` is kept. Of one that
            was made inside `deferred_init`, each rank makes its part.
        device_mesh: mesh, of which every rank must make this call.
        placements: one per mesh axis; default: `Replicate()` on all. With `Partial()` the first
            rank of the axis keeps the value and the others hold zero.
        src_data_rank: rank *within each mesh axis's group* whose data count; they are broadcast
            first. None (default) communicates nothing and trusts that all ranks hold the same.

    Returns:
        A DTensor whose local part is a copy: memory is not shared with `tensor`.

    Raises:
        ValueError: `tensor` is not a leaf, is on another kind of device than the mesh, or is a
            DTensor of another layout.
    """
    require_outside("distribute_tensor")
    info = mesh_info(device_mesh)
    if isinstance(tensor, DTensor):
        wanted = tensor._spec.types if placements is None else _types(placements, info, tensor._spec.ndim)
        if tensor._spec.mesh is not info or wanted != tensor._spec.types:
            raise ValueError(
                f"tensor is a DTensor already ({tensor._spec!r} on {tensor._spec.mesh!r}); use redistribute(placements)"
            )
        return tensor
    if not tensor.is_leaf:
        raise ValueError("tensor is the result of an operation that autograd recorded; pass tensor.detach() or a leaf")
    if tensor.device.type not in (info.device_type, "meta"):
        raise ValueError(
            f"tensor is on {tensor.device}, the mesh is of {info.device_type!r} devices; "
            f"move it with tensor.to({info.device_type!r})"
        )
    types = (I,) * info.ndim if placements is None else _types(placements, info, tensor.ndim)
    source = replicated(info, tensor.shape)
    deferred = is_deferred(tensor)
    part = deferred_local(tensor, info, types) if deferred and src_data_rank is None else None
    if part is None:
        local = whole = whole_on(tensor, info) if deferred else tensor.detach()
        if src_data_rank is not None:
            local = _broadcast(local, info, src_data_rank)
        local = run_plan(local, plan(source, types)) if types != source.types else local
        shared = local.data_ptr() == whole.data_ptr() and not (deferred and local is whole)
        part = local.clone() if shared else local
    local = part
    local.requires_grad_(tensor.requires_grad)
    local.__class__ = DTensor
    local._spec = source.with_types(types)  # type: ignore[attr-defined]
    if isinstance(tensor, torch.nn.Parameter):
        local._is_param = True
    return local  # type: ignore[return-value]


def _types(placements: Sequence[Placement], info: MeshInfo, ndim: int, argument: str = "placements") -> AxisTypes:
    return to_axis_types(placements, mesh_ndim=info.ndim, ndim=ndim, argument=argument)


def _broadcast(whole: Tensor, info: MeshInfo, source: int) -> Tensor:
    local = whole.clone(memory_format=torch.contiguous_format)
    for axis in range(info.ndim):
        if not 0 <= source < info.sizes[axis]:
            raise ValueError(
                f"src_data_rank = {source} is outside mesh axis {info.axis_name(axis)!r} of size {info.sizes[axis]}"
            )
        dist.broadcast(local, group=info.group((axis,)), group_src=source)
    return in_order(local, whole.shape, whole.stride())


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """See `DTensor.from_local`."""
    info = mesh_info(device_mesh)
    if isinstance(local, DTensor):
        raise ValueError("local_tensor is a DTensor already; use redistribute(placements), or pass its to_local()")
    if local.device.type not in (info.device_type, "meta"):
        raise ValueError(f"local_tensor is on {local.device}, the mesh is of {info.device_type!r} devices")
    types = _types(placements, info, local.ndim if shape is None else len(shape))
    if shape is None:
        shape = _global_shape(local, info, types, run_check)
    spec = spec_of(info, tuple(shape), types)
    if spec.irregular and local.numel() == math.prod(spec.local_shape):
        local = local.reshape(spec.local_shape)  # a flat piece will do for a ragged shard
    if spec.local_shape != tuple(local.shape):
        raise ValueError(
            f"local_tensor has shape {list(local.shape)}, but rank {dist.get_rank()} at {info.coordinate} of {info!r} "
            f"holds {list(spec.local_shape)} of a tensor of shape {list(shape)} placed ({short(types)}); parts must be "
            "cut as the placements cut, `Shard` as torch.chunk: give every rank its part, or pass the true `shape`"
        )
    if run_check:
        _check_agreement(local, info, spec)
    if grad_placements is not None:
        spec = _with_gradient(spec, grad_placements, info)
    return make(local, spec)


def _global_shape(local: Tensor, info: MeshInfo, types: AxisTypes, ask: bool) -> list[int]:
    """Sizes of the whole: asked of all ranks where a dim may be uneven, else local size times number of parts."""
    shape = list(local.shape)
    for axis in _inside_out(types):
        (dim,) = cut_dims_of(types[axis])
        if ask and info.sizes[axis] > 1:
            sizes = gather_objects(shape, info.group((axis,)), info.device_type)
            shape[dim] = sum(s[dim] for s in sizes)
        else:
            shape[dim] *= info.sizes[axis]
    return shape


def _inside_out(types: AxisTypes) -> list[int]:
    """Axes that cut a dim, the last cut first."""
    for t in types:
        if isinstance(t, Ragged) and t.lead > 1:
            raise ValueError(
                f"from_local: a ragged shard has flattened dims {t.dims}, so that the local parts do not tell the "
                "shape of the whole; pass the global `shape`"
            )
    axes = [a for a, t in enumerate(types) if is_cut(t)]
    return sorted(axes, key=lambda a: (isinstance(types[a], Ragged), a), reverse=True)


def _check_agreement(local: Tensor, info: MeshInfo, spec: Spec) -> None:
    mine = (tuple(spec.shape), spec.types, local.dtype)
    said = gather_objects(mine, info.group(tuple(range(info.ndim))), info.device_type)
    if any(s != mine for s in said):
        lines = "; ".join(
            f"{c}: shape {list(s[0])}, placements ({short(s[1])}), {s[2]}"
            for c, s in zip(info.members(tuple(range(info.ndim))), said, strict=True)
        )
        raise ValueError(
            f"from_local: the ranks of {info!r} do not describe one tensor. By mesh coordinate: {lines}. "
            "Pass the same placements and dtype, and matching local shapes, on every rank"
        )


def _with_gradient(spec: Spec, grad_placements: Sequence[Placement], info: MeshInfo) -> Spec:
    types = duals(_types(grad_placements, info, spec.ndim, "grad_placements"))
    for axis, (here, to) in enumerate(zip(spec.types, types, strict=True)):
        if here != to and not {here, to} <= {I, R}:
            raise ValueError(
                f"grad_placements[{axis}] = {grad_placements[axis]!r} does not fit placement {to_placement(here)!r}"
            )
    return spec.with_types(types)
