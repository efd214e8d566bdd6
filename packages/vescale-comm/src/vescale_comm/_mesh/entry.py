"""`reduce_over` and `calibrate`: the functions, with what they keep for each mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._report.costs import OPERATIONS, AxisCost, MeshCosts
from .._report.host import HostCosts
from .._transport import Work, measure, measure_beside
from .axes import axis_name, axis_numbers, wide_axes
from .host import measure_host
from .reducer import MeshReducer

__all__ = ["calibrate", "reduce_over"]

ALGORITHMS = {"p2p": "direct", "shared": "direct"}


def reduce_over(
    tensor_or_list: Tensor | Sequence[Tensor],
    mesh: DeviceMesh,
    axes: int | str | Sequence[int | str],
    *,
    op: str = "sum",
    divisor: float = 1,
    order: str | None = None,
    transport: str = "auto",
    accumulate: torch.dtype | None = None,
    plan: str | None = None,
    async_op: bool = False,
) -> Work:
    """Reduce tensors in place over any set of axes of a mesh, with one call and one message per dtype.

    Every rank of the mesh calls it with tensors of the same shapes and dtypes. What is kept between calls, groups and
    transports, belongs to the mesh that others were sliced from.

    Args:
        tensor_or_list: of any shapes, strides and dtypes, on the device of the mesh; autograd does not see the change.
        mesh: the mesh.
        axes: names or indices, or one.
        op: "sum", "avg", "min", "max" or "product"; all but sums keep what is not a number.
        divisor: by which sums are divided.
        order: "canonical" adds in an order that depends on nothing but the mesh and the plan; "native": as the backend
            likes; None: canonical, but native on NCCL.
        transport: "auto", "native", "p2p", "shared" or "emulated"; see `vescale_comm.transport`.
        accumulate: dtype of sums; None: that of each tensor.
        plan: "flat": all ranks as one group; "axes": one axis after the other; "nested": reduce-scatter along the last
            axis, all-reduce along the others, all-gather; None: the quickest by sizes, see `MeshReducer`.
        async_op: return at once; the tensors must not be touched before `wait`, and waits finish in order.

    Returns:
        What to wait for; finished already unless `async_op`.

    Raises:
        ValueError: an argument makes no sense, such as an axis that the mesh has not.
        TransportError: a rank is gone, or did not come within the time-out.
    """
    tensors = [tensor_or_list] if isinstance(tensor_or_list, Tensor) else list(tensor_or_list)
    work = _reducer(mesh, transport, order).all_reduce(
        tensors, axes, op=op, divisor=divisor, accumulate=accumulate, plan=plan
    )
    if not async_op:
        work.wait()
    return work


def calibrate(
    mesh: DeviceMesh,
    axes: Sequence[int | str] | None = None,
    *,
    together: Sequence[Sequence[int | str]] = (),
    transport: str = "auto",
    order: str | None = None,
    seconds: float = 0.3,
) -> MeshCosts:
    """Measure collectives along axes of a mesh, and this host; every rank must call it, and all get the same numbers.

    Collectives are measured alone, and beside a computation that needs the same processors.

    Args:
        mesh: the mesh.
        axes: which; None: all.
        together: sets of axes to measure as one group, too.
        transport: see `vescale_comm.transport`.
        order: of sums.
        seconds: about how long each may take, alone; and again beside a computation.

    Returns:
        The costs as the slowest ranks saw them, for `predict`.
    """
    reducer = _reducer(mesh, transport, order)
    alone = range(mesh.ndim) if axes is None else axis_numbers(mesh, axes)
    wanted = [wide_axes(mesh, (axis,)) for axis in alone]
    wanted += [wide_axes(mesh, axis_numbers(mesh, names)) for names in together]
    found: dict[tuple[str, ...], AxisCost] = {}
    for some in dict.fromkeys(one for one in wanted if one):
        over = reducer.transport_over(some)
        apart = measure(over, reducer.device, seconds=seconds)
        beside = measure_beside(over, reducer.device, apart, seconds=seconds)
        costs = [
            part for each in (apart, beside) for name in OPERATIONS for part in (each[name].alpha, each[name].beta)
        ]
        largest = _largest(reducer, costs)
        pairs = list(zip(largest[::2], largest[1::2], strict=True))
        named = tuple(axis_name(mesh, axis) for axis in some)
        found[named] = AxisCost(
            over.size,
            dict(zip(OPERATIONS, pairs[: len(OPERATIONS)], strict=True)),
            ALGORITHMS.get(over.name, "ring"),
            dict(zip(OPERATIONS, pairs[len(OPERATIONS) :], strict=True)),
            stages=over.name == "shared",
        )
    host = asdict(measure_host(mesh.get_group(0), reducer.device))
    return MeshCosts(found, HostCosts(*_largest(reducer, list(host.values()))))


def _largest(reducer: MeshReducer, numbers: Sequence[float]) -> list[float]:
    """Return the largest that any rank of the mesh has, of each number."""
    everyone = wide_axes(reducer.mesh, range(reducer.mesh.ndim))
    told = torch.tensor(numbers, dtype=torch.float64, device=reducer.device)
    reducer.all_reduce([told], everyone, op="max").wait()
    found: list[float] = told.tolist()
    return found


class _Kept:
    """Reducers that belong to a mesh; what is copied or unpickled from the mesh starts without."""

    __slots__ = ("reducers", "world")

    def __init__(self) -> None:
        self.world: Any = None
        self.reducers: dict[Any, MeshReducer] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def _kept_by(mesh: DeviceMesh) -> dict[Any, MeshReducer]:
    kept: _Kept = mesh.__dict__.setdefault("_vescale_comm", _Kept())
    world = dist.group.WORLD
    if kept.world is not world:  # the process groups were torn down and made anew
        kept.world, kept.reducers = world, {}
    return kept.reducers


def _reducer(mesh: DeviceMesh, transport: str, order: str | None) -> MeshReducer:
    """Return what reduces over a mesh, made at the first use; it dies with the mesh, or with the process groups."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: needs a DeviceMesh; got {type(mesh).__name__}.")
    own, key = _kept_by(mesh), (str(transport), order)
    if key not in own:
        # Slices of a mesh are new objects each time, but share groups and transports.
        root: Any = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        ranks = (tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), mesh.mesh_dim_names)
        shared = _kept_by(root)
        if (ranks, key) not in shared:
            shared[ranks, key] = MeshReducer(mesh, transport=transport, order=order)
        own[key] = shared[ranks, key]
    return own[key]
