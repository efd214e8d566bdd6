"""`local_map`: run a function on local parts, the escape hatch for what has no sharding rule.

Along each mesh axis, what the inputs are decides what gradients they get: a replicated input that meets
sharded ones, or gives sharded results, receives a part of its gradient on every rank, so it is cast to
`Varying()` first and the parts are summed in the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._comm.move import move, strip
from ._irregular import Ragged, cut_dims_of
from ._mesh import MeshInfo, mesh_info
from ._spec import spec_of
from ._tensor import DTensor, make
from .errors import MeshMismatchError
from .placements import I, Placement, R, Replicate, Varying, short, to_axis_types

Placed = Sequence[Placement] | None


def local_map(
    fn: Callable[..., Any],
    out_placements: Placed | Sequence[Placed],
    in_placements: Sequence[Placed] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs `fn` on their local parts and labels its results.

    `fn` may communicate itself; a result that it made equal on all ranks is `Replicate()`, whose gradient
    arrives complete on every rank, or `Varying()` if its gradient arrives in parts. Plain tensors are handed
    through. If all inputs are evenly cut, results must have equal shapes on all ranks and nothing is
    communicated; otherwise their sizes are exchanged.

    Args:
        fn: function of plain local tensors.
        out_placements: of each result in flattened order, None for results that stay plain; one sequence
            of placements if there is one result.
        in_placements: of each flattened argument, None for what is not a DTensor; default: as they come.
        device_mesh: default: that of the first DTensor argument.
        redistribute_inputs: redistribute inputs that are placed otherwise, instead of raising.

    Raises:
        ValueError: when called: an input is placed otherwise than `in_placements` says, or the number of
            inputs or results does not fit.
        MeshMismatchError: when called: an input lies on another mesh.

    >>> rowwise = local_map(torch.cumsum, [Shard(0)], [[Shard(0)], None])  # doctest: +SKIP
    """
    outs = _one_per_result(out_placements)
    name = getattr(fn, "__name__", None) or repr(fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        first = next((a for a in flat if isinstance(a, DTensor)), None)
        if first is None and device_mesh is None:
            return fn(*args, **kwargs)
        mesh = first._spec.mesh if device_mesh is None and first is not None else mesh_info(device_mesh)  # type: ignore[arg-type]
        if in_placements is not None:
            flat = _as_wanted(name, flat, in_placements, redistribute_inputs)
        _require_mesh(name, flat, mesh)
        inputs = _for_gradients(flat, outs, mesh)
        local_args, local_kwargs = tree_unflatten([strip(a) if isinstance(a, DTensor) else a for a in inputs], tree)
        results, out_tree = tree_flatten(fn(*local_args, **local_kwargs))
        if len(results) != len(outs):
            raise ValueError(f"{name} gave {len(results)} results, but out_placements has {len(outs)} entries: {outs}")
        even = all(a._spec.even for a in inputs if isinstance(a, DTensor))
        labelled = [
            _label(r, p, mesh, even, f"out_placements[{i}]") for i, (r, p) in enumerate(zip(results, outs, strict=True))
        ]
        return tree_unflatten(labelled, out_tree)

    return wrapped


def _one_per_result(out_placements: Any) -> list[Placed]:
    if out_placements is None:
        return [None]
    if out_placements and all(isinstance(p, Placement) for p in out_placements):
        return [out_placements]
    return list(out_placements)


def _as_wanted(name: str, flat: list[Any], wanted: Sequence[Placed], move_them: bool) -> list[Any]:
    """Check every argument against its placements, and move it where that is allowed."""
    if len(wanted) != len(flat):
        raise ValueError(f"{name} got {len(flat)} arguments, but in_placements has {len(wanted)} entries")
    placed = []
    for i, (arg, placements) in enumerate(zip(flat, wanted, strict=True)):
        where = f"in_placements[{i}]"
        if isinstance(arg, DTensor) and placements is None:
            raise ValueError(f"{where} is None, but argument {i} of {name} is a DTensor ({arg._spec!r})")
        if not isinstance(arg, DTensor) and placements is not None:
            raise ValueError(
                f"{where} = {placements}, but argument {i} of {name} is a {type(arg).__name__}; give None for it"
            )
        placed.append(_placed(name, arg, placements, where, move_them) if placements is not None else arg)
    return placed


def _placed(name: str, arg: DTensor, placements: Sequence[Placement], where: str, move_it: bool) -> DTensor:
    spec = arg._spec
    types = to_axis_types(placements, mesh_ndim=spec.mesh.ndim, ndim=spec.ndim, argument=where)
    alike = all(a == b or {a, b} <= {I, R} for a, b in zip(spec.types, types, strict=True))
    if not alike and not move_it:
        raise ValueError(
            f"{where} is ({short(types)}), but the argument of {name} is {spec!r} on {spec.mesh!r}; "
            "redistribute it, or pass redistribute_inputs=True"
        )
    return move(arg, types)


def _require_mesh(name: str, flat: list[Any], mesh: MeshInfo) -> None:
    for i, arg in enumerate(flat):
        if isinstance(arg, DTensor) and arg._spec.mesh is not mesh:
            raise MeshMismatchError(f"argument {i} of {name} lies on {arg._spec.mesh!r}, not on {mesh!r}")


def _for_gradients(inputs: list[Any], outs: Sequence[Placed], mesh: MeshInfo) -> list[Any]:
    """Cast replicated inputs to R along every axis where an input or a result is anything but I."""
    dtensors = [a for a in inputs if isinstance(a, DTensor)]
    mixed = [
        any(a._spec.types[axis] != I for a in dtensors) or any(p is not None and not _invariant(p, axis) for p in outs)
        for axis in range(mesh.ndim)
    ]
    return [
        move(a, tuple(R if t == I and m else t for t, m in zip(a._spec.types, mixed, strict=True)))
        if isinstance(a, DTensor)
        else a
        for a in inputs
    ]


def _invariant(placements: Sequence[Placement], axis: int) -> bool:
    here = placements[axis] if axis < len(placements) else None
    return isinstance(here, Replicate) and not isinstance(here, Varying)


def _label(result: Any, placements: Placed, mesh: MeshInfo, even: bool, where: str) -> Any:
    if placements is None:
        return result
    if not isinstance(result, Tensor) or isinstance(result, DTensor):
        raise ValueError(
            f"{where} = {placements}, but that result is a {type(result).__name__}, not a plain local tensor"
        )
    types = to_axis_types(placements, mesh_ndim=mesh.ndim, ndim=result.ndim, argument=where)
    if not even or any(isinstance(t, Ragged) for t in types):
        return DTensor.from_local(result, mesh.device_mesh, placements)
    shape = list(result.shape)
    for axis, t in enumerate(types):
        for dim in cut_dims_of(t):
            shape[dim] *= mesh.sizes[axis]
    spec = spec_of(mesh, shape, types)
    return make(result, spec if torch.is_grad_enabled() else spec.invariant)
