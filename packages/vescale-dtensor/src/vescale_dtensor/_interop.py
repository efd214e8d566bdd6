"""Conversion to and from torch's own DTensor: shares memory, keeps gradients.

torch's class knows one kind of replication, whose gradient is complete on every rank once it leaves
torch's graph; so does `Replicate()` here. `Varying()` is therefore turned into `Replicate()` first.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial

from ._comm.move import move, strip
from ._mesh import mesh_info
from ._spec import spec_of
from ._tensor import DTensor, make
from .errors import UnsupportedOperationError
from .placements import I, R, Replicate, Shard, to_axis_types


def to_torch(tensor: DTensor) -> TorchDTensor:
    """Return torch's DTensor over the same local memory. Differentiable; communicates nothing forward.

    Args:
        tensor: a DTensor of this package.

    Raises:
        TypeError: `tensor` is something else.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"tensor must be a vescale_dtensor.DTensor, got {type(tensor).__module__}.{type(tensor).__name__}"
        )
    x = move(tensor, tuple(I if t == R else t for t in tensor._spec.types))
    spec = x._spec
    if spec.irregular:
        raise UnsupportedOperationError(
            f"torch's DTensor has no counterpart for {spec!r}; redistribute it to Shard(dim) or Replicate() first"
        )
    return TorchDTensor.from_local(
        strip(x), spec.mesh.device_mesh, x.placements, run_check=False, shape=spec.shape, stride=tuple(x.stride())
    )


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Return a DTensor over the local memory of one of torch's. Differentiable; communicates nothing forward.

    Args:
        tensor: a `torch.distributed.tensor.DTensor` with the placements Shard, Replicate and Partial("sum").

    Raises:
        TypeError: `tensor` is something else.
        UnsupportedOperationError: it has a placement that this package does not know.
    """
    if not isinstance(tensor, TorchDTensor):
        raise TypeError(
            f"tensor must be a torch.distributed.tensor.DTensor, got {type(tensor).__module__}.{type(tensor).__name__}"
        )
    info = mesh_info(tensor.device_mesh)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) not in (Shard, Replicate, Partial) or getattr(placement, "reduce_op", "sum") != "sum":
            raise UnsupportedOperationError(
                f"placement {placement!r} on mesh axis {info.axis_name(axis)!r} has no counterpart in vescale_dtensor, "
                "which knows Shard(dim), Replicate() and Partial() sums; redistribute the torch DTensor first"
            )
    _require_default_order(tensor)
    types = to_axis_types(tensor.placements, mesh_ndim=info.ndim, ndim=tensor.ndim)
    spec = spec_of(info, tuple(tensor.shape), types)
    local: Any = tensor.to_local()
    wait = getattr(local, "wait", None)
    if wait is not None:  # a result of torch's asynchronous collectives
        local = wait()
    if tuple(local.shape) != spec.local_shape:
        raise UnsupportedOperationError(
            f"the local part of the torch DTensor has shape {list(local.shape)}, "
            f"but torch.chunk cuts {list(tensor.shape)} placed "
            f"{list(tensor.placements)} into {list(spec.local_shape)} for this rank; redistribute it first"
        )
    return make(local, spec)


def _require_default_order(tensor: TorchDTensor) -> None:
    """Refuse a dim that is cut by several mesh axes in another order than left to right."""
    order = getattr(tensor._spec, "shard_order", None)
    for entry in order or ():
        axes = list(getattr(entry, "mesh_dims", ()))
        if axes != sorted(axes):
            raise UnsupportedOperationError(
                f"tensor dim {entry.tensor_dim} is cut by the mesh axes {axes} in that order; vescale_dtensor cuts in "
                f"the order of the "
                "mesh: redistribute the torch DTensor without shard_order first"
            )
