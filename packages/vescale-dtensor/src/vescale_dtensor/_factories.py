"""Factories: tensors made sharded, of which each rank allocates its own part only.

Signatures follow `torch.distributed.tensor`. Random ones draw what the provider of random numbers says
(see `_random`). With `Partial()` on an axis, its first rank holds the value and the others zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._comm.move import run_plan
from ._comm.plan import plan
from ._deferred import require_outside
from ._mesh import mesh_info
from ._spec import Spec, replicated, spec_of
from ._tensor import DTensor, make
from .placements import I, P, Placement, R, to_axis_types

__all__ = ["arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros"]

Placements = Sequence[Placement] | None


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    for n in size:
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"size = {size}: sizes must be integers of at least 0")
    return tuple(size)


def _spec(shape: tuple[int, ...], device_mesh: DeviceMesh | None, placements: Placements, layout: torch.layout) -> Spec:
    require_outside("a factory of DTensors")
    if layout is not torch.strided:
        raise ValueError(f"layout = {layout}: DTensors are strided")
    if device_mesh is None:
        raise ValueError(
            'device_mesh is missing; make one with init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))'
        )
    info = mesh_info(device_mesh)
    if placements is None:
        return replicated(info, shape)
    return spec_of(info, shape, to_axis_types(placements, mesh_ndim=info.ndim, ndim=len(shape)))


def _keeps(spec: Spec) -> bool:
    """Whether this rank holds the value of a pending sum, rather than zero."""
    return all(t != P or c == 0 for t, c in zip(spec.types, spec.mesh.coordinate, strict=True))


def _leaf(local: Tensor, spec: Spec, requires_grad: bool) -> DTensor:
    x = make(local, spec)
    x.requires_grad_(requires_grad)
    return x


def _done(local: Tensor, spec: Spec, requires_grad: bool) -> DTensor:
    if not _keeps(spec):
        local.zero_()
    return _leaf(local, spec, requires_grad)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a DTensor with uninitialized values. Communicates nothing.

    Args:
        size: global sizes, or one sequence of them.
        dtype: default: torch's default dtype.
        layout: only `torch.strided`.
        requires_grad: whether autograd records operations on it.
        device_mesh: the mesh; required.
        placements: one per mesh axis; default: `Replicate()` on all.
    """
    spec = _spec(_shape(size), device_mesh, placements, layout)
    local = torch.empty(spec.local_shape, dtype=dtype, device=spec.mesh.device_type)
    return _leaf(local, spec, requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a DTensor filled with `fill_value`, whose type decides the dtype where none is given. See `empty`."""
    spec = _spec(_shape((size,)), device_mesh, placements, layout)
    return _done(
        torch.full(spec.local_shape, fill_value, dtype=dtype, device=spec.mesh.device_type), spec, requires_grad
    )


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a DTensor of zeros. See `empty`."""
    spec = _spec(_shape(size), device_mesh, placements, layout)
    return _done(torch.zeros(spec.local_shape, dtype=dtype, device=spec.mesh.device_type), spec, requires_grad)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a DTensor of ones. See `empty`."""
    spec = _spec(_shape(size), device_mesh, placements, layout)
    return _done(torch.ones(spec.local_shape, dtype=dtype, device=spec.mesh.device_type), spec, requires_grad)


def _cut(
    whole: Tensor, device_mesh: DeviceMesh | None, placements: Placements, layout: torch.layout, requires_grad: bool
) -> DTensor:
    """This rank's part of a small tensor that was made whole, so that its rounding is that of one device."""
    spec = _spec(tuple(whole.shape), device_mesh, placements, layout)
    local = run_plan(whole, plan(replicated(spec.mesh, spec.shape), spec.types))
    return _leaf(local, spec, requires_grad)


def _device(device_mesh: DeviceMesh | None) -> str:
    return device_mesh.device_type if device_mesh is not None else "cpu"


def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return the numbers from `start` (default 0) up to, but without, `end`. See `empty`."""
    start, end = (0, start) if end is None else (start, end)
    if all(isinstance(v, int) for v in (start, end, step)) and step and dtype in (None, torch.int64):
        size = max(0, -((start - end) // step))  # integers are exact, so each rank makes its own only
        spec = _spec((size,), device_mesh, placements, layout)
        if spec.irregular:
            whole = torch.arange(start, end, step, device=spec.mesh.device_type)
            return _cut(whole, device_mesh, placements, layout, requires_grad)
        (offset,), (length,) = spec.local_offset, spec.local_shape
        own = torch.arange(offset, offset + length, device=spec.mesh.device_type)
        return _done(own.mul_(step).add_(start), spec, requires_grad)
    whole = torch.arange(start, end, step, dtype=dtype, device=_device(device_mesh))
    return _cut(whole, device_mesh, placements, layout, requires_grad)


def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return `steps` evenly spaced numbers from `start` to `end`, both included. See `empty`."""
    whole = torch.linspace(start, end, steps, dtype=dtype, device=_device(device_mesh))
    return _cut(whole, device_mesh, placements, layout, requires_grad)


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return the `n` by `m` (default: `n`) identity matrix. See `empty`."""
    spec = _spec(_shape((n, n if m is None else m)), device_mesh, placements, layout)
    if spec.irregular:
        whole = torch.eye(*spec.shape, dtype=dtype, device=spec.mesh.device_type)
        return _cut(whole, device_mesh, placements, layout, requires_grad)
    rows, columns = (
        torch.arange(o, o + length, device=spec.mesh.device_type)
        for o, length in zip(spec.local_offset, spec.local_shape, strict=True)
    )
    local = (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())
    return _done(local, spec, requires_grad)


def _drawn(
    op: str,
    spec: Spec,
    dtype: torch.dtype | None,
    args: tuple[Any, ...],
    generator: torch.Generator | None,
    requires_grad: bool,
) -> DTensor:
    from . import _random

    local = torch.empty(spec.local_shape, dtype=dtype, device=spec.mesh.device_type)
    whole = spec.with_types(tuple(I if t in (P, R) else t for t in spec.types))
    _random.fill(op, local, whole, args, {} if generator is None else {"generator": generator}, contiguous=True)
    return _done(local, spec, requires_grad)


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return uniform draws from [0, 1). See `empty`.

    Args:
        size: global sizes, or one sequence of them.
        dtype: default: torch's default dtype.
        layout: only `torch.strided`.
        requires_grad: whether autograd records operations on it.
        generator: default: the default generator of the mesh's device. The same state on every rank.
        device_mesh: the mesh; required.
        placements: one per mesh axis; default: `Replicate()` on all.
    """
    return _drawn("rand", _spec(_shape(size), device_mesh, placements, layout), dtype, (), generator, requires_grad)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return draws from the normal distribution of mean 0 and deviation 1. See `rand`."""
    return _drawn("randn", _spec(_shape(size), device_mesh, placements, layout), dtype, (), generator, requires_grad)


def randint(
    low: int,
    high: Any = None,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return integers from `low` (default 0) up to, but without, `high`. See `rand`.

    >>> randint(10, (4, 8), device_mesh=mesh)  # doctest: +SKIP
    >>> randint(5, 10, (4, 8), device_mesh=mesh)  # doctest: +SKIP
    """
    if size is None:
        low, high, size = 0, low, high
    if not isinstance(size, Sequence):
        raise TypeError(
            f"size = {size!r}: expected a sequence of sizes, as in randint(10, (4, 8)) or randint(0, 10, (4, 8))"
        )
    spec = _spec(_shape((size,)), device_mesh, placements, layout)
    return _drawn("randint", spec, dtype, (low, high), generator, requires_grad)
