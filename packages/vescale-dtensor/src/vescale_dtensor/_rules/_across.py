"""Building blocks of local functions that reduce over sharded dims: differentiable, on plain tensors.

`total` (pending sum to the value) and `vary` (the value, for use with sharded operands) are each
other's backward, so anything composed of them and local operations has right gradients of every
order. A maximum is not linear: `extreme` finds its value without autograd, and `winner` sends the
gradient to the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.move import move_local
from .._comm.steps import AllReduce, ReduceExtremum
from .._mesh import Axes, MeshInfo
from .._spec import Spec, spec_of
from ..errors import UnsupportedOperationError
from ..placements import I


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, step: AllReduce) -> Tensor:
        ctx.step = step
        out = local.clone(memory_format=torch.contiguous_format)
        work = step.start_in_place(out)
        if work is not None:
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Vary.apply(grad, ctx.step), None  # type: ignore[no-untyped-call]


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, step: AllReduce) -> Tensor:
        ctx.step = step
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grad, ctx.step), None  # type: ignore[no-untyped-call]


class _Winner(torch.autograd.Function):
    """The extreme value of all ranks as a function of this rank's own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor, weight: Tensor, step: AllReduce) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.step = step
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        grad = _Vary.apply(grad, ctx.step)  # type: ignore[no-untyped-call]
        return torch.where(weight != 0, grad * weight, torch.zeros_like(grad)), None, None, None


class Across:
    """Reductions over mesh `axes`."""

    def __init__(self, mesh: MeshInfo, axes: Axes) -> None:
        self.mesh, self.axes, self.num = mesh, axes, mesh.size_of(axes)
        self._sum = AllReduce(mesh, axes)
        self._max = ReduceExtremum(mesh, axes, dist.ReduceOp.MAX)
        self._min = ReduceExtremum(mesh, axes, dist.ReduceOp.MIN)

    def total(self, local: Tensor) -> Tensor:
        """Sum over the ranks; the gradient of the result is the same on every rank."""
        return _Total.apply(local, self._sum)  # type: ignore[no-any-return, no-untyped-call]

    def vary(self, value: Tensor) -> Tensor:
        """The same value, whose gradients (one part per rank) are added up."""
        return _Vary.apply(value, self._sum)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, partial: Tensor, out: Spec) -> Tensor:
        """Stack the ranks' partial results, laid out as `out` says, along a new first dim. Differentiable."""
        # Other axes take no part: what they have left is the whole here.
        types = tuple(0 if a in self.axes else I for a in range(self.mesh.ndim))
        spec = spec_of(self.mesh, (self.num, *out.local_shape), types)
        return move_local(partial.unsqueeze(0), spec, (I,) * self.mesh.ndim)

    def extreme(self, local: Tensor, *, largest: bool) -> Tensor:
        """Maximum or minimum over the ranks, without autograd. NaN wins, as in torch."""
        local = local.detach()
        step = self._max if largest else self._min
        if not local.dtype.is_floating_point:
            wide = local if local.dtype == torch.int64 else local.to(torch.int32)
            return step.run(wide.clone(memory_format=torch.contiguous_format)).to(local.dtype)
        wide = local if local.dtype == torch.float64 else local.float()
        nan = wide.isnan()  # what a backend's maximum does with NaN is not defined, so a flag travels along
        identity = -torch.inf if largest else torch.inf
        flag = nan.to(wide.dtype)
        value, flag = step.run(torch.stack([wide.masked_fill(nan, identity), flag if largest else -flag])).unbind(0)
        return value.masked_fill(flag != 0, torch.nan).to(local.dtype)

    def winner(self, own: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        """`value` (see `extreme`), whose gradient times `weight` is the gradient of `own` on this rank."""
        return _Winner.apply(own, value, weight.to(own.dtype), self._sum)  # type: ignore[no-any-return, no-untyped-call]


def first_order_only(what: str, operands: str) -> None:
    """Call in a backward that autograd cannot differentiate.

    `once_differentiable` of torch is not enough: with an incoming gradient that needs none itself, a constant one
    perhaps, it leaves out quietly what depends on the inputs.

    Raises:
        UnsupportedOperationError: this backward is recorded (``create_graph=True``).
    """
    if torch.is_grad_enabled():
        raise UnsupportedOperationError(
            f"{what} has no second derivatives, which create_graph=True asks for; redistribute {operands} to "
            "Replicate() first"
        )


def identity_of(dtype: torch.dtype, *, largest: bool) -> Any:
    """The value that never wins a maximum (minimum)."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def filled(x: Tensor, dims: tuple[int, ...], value: Any) -> Tensor:
    """Give an empty shard one element of `value` along each of `dims`.

    Stays connected to the graph of `x`, in backwards of every order: with `cat`, whose gradient of an empty 1-d
    tensor is a constant, the ranks would disagree on what to communicate.
    """
    for dim in dims:
        if x.ndim and x.shape[dim] == 0:
            x = torch.constant_pad_nd(x, (*(0, 0) * (x.ndim - 1 - dim), 0, 1), value)
    return x


def on_empty_shard(run: Callable[..., Any], spec: Spec, outs: Sequence[Spec]) -> Callable[..., Any]:
    """Spare a function that refuses empty tensors, or answers them oddly, the sight of an empty shard.

    It runs on made-up elements instead, which are cut off its results.
    """
    dims = tuple(d for d, n in enumerate(spec.local_shape) if n == 0 and spec.shape[d])
    if not dims:
        return run

    def local(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = run(filled(x, dims, 0), *args, **kwargs)
        if isinstance(result, Tensor):
            return _cut(result, outs[0])
        return type(result)([_cut(r, o) for r, o in zip(result, outs, strict=True)])

    return local


def _cut(result: Tensor, spec: Spec) -> Tensor:
    for dim, length in enumerate(spec.local_shape):
        result = result.narrow(dim, 0, length)
    return result
