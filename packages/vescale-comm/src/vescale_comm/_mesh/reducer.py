"""Reductions over any set of mesh axes: several tensors in one message, as one group or axis by axis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._report.costs import MeshCosts
from .._report.watch import watch
from .._transport import Transport, Work, add_in_order, transport
from ..errors import CommError
from .axes import axis_name, axis_numbers, group_over, wide_axes
from .ordered import Ordered, Steps
from .plans import PLANS, choose_plan, default_costs

__all__ = ["OPERATIONS", "MeshReducer"]

OPERATIONS = ("sum", "avg", "min", "max", "product")
ROOM = 32 << 20
"""Bytes that are gathered at once where ranks combine what is no sum."""

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class MeshReducer:
    """Reduces tensors over axes of one mesh; groups and transports are made when they are first needed, and kept.

    Every rank of the mesh makes it, and calls it in the same order with tensors of the same shapes and dtypes. Several
    reductions may be under way; waiting for one finishes those that were begun before it. Later steps of a reduction
    begin in waits: a rank must not block in other collectives before a wait that the others have behind them.

    Bits: "flat" adds ranks in the order of their numbers, which in a usual mesh is row-major over the axes; "axes" and
    "nested" add along the last axis first, then along the one before it, and so on, which gives other bits than "flat",
    but both the same. What is chosen depends on bytes, sizes of axes and `costs` only: without `costs`, on orders of
    magnitude that are fixed for each kind of transport.

    Args:
        mesh: the mesh; this rank must be in it.
        transport: kind of transport; see `vescale_comm.transport`.
        order: of sums; None: canonical, but native on NCCL.
        costs: of the axes, such as from `calibrate`, the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> x = torch.tensor([3.0])
        >>> MeshReducer(mesh).all_reduce([x], ("dp", "tp"), divisor=2).wait()
        >>> x
        tensor([1.5000])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, mesh: DeviceMesh, *, transport: str = "auto", order: str | None = None, costs: MeshCosts | None = None
    ) -> None:
        if not isinstance(transport, str):
            raise TypeError(f"transport: needs the name of a kind, since there are several groups; got {transport!r}.")
        self.mesh = mesh
        self._kind, self._order, self._costs = transport, order, costs
        self._transports: dict[tuple[tuple[int, ...], bool], Transport] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._last: Ordered | None = None
        self._names = tuple(axis_name(mesh, axis) for axis in range(mesh.ndim))
        self._sizes = {name: mesh.size(axis) for axis, name in enumerate(self._names)}
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        axes: int | str | Sequence[int | str],
        *,
        op: str = "sum",
        divisor: float = 1,
        accumulate: torch.dtype | None = None,
        plan: str | None = None,
    ) -> Work:
        """Begin to reduce tensors in place; they must not be touched before `wait` of what is returned.

        Args:
            tensors: of any shapes, strides and dtypes, on the device of the mesh; those of one dtype go together.
            axes: of the mesh; indices, names, or one of them.
            op: "sum", "avg", "min", "max" or "product"; all but sums keep what is not a number.
            divisor: by which sums are divided.
            accumulate: dtype of sums; None: that of each tensor. Another one is kept to all along, so "flat" is used.
            plan: "flat", "axes" or "nested"; None: the quickest.

        Raises:
            ValueError: an argument makes no sense.
            CommError: a tensor is on another device.
        """
        begun = time.perf_counter()
        numbers = axis_numbers(self.mesh, axes)
        self._check(tensors, op, divisor, plan)
        wide = wide_axes(self.mesh, numbers)
        if op == "avg":
            for axis in wide:
                divisor *= self.mesh.size(axis)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        works = []
        for group in by_dtype.values():
            flat = _flat(group)
            if op in _COMBINE:
                steps = self._combine(flat, wide, _COMBINE[op])
            elif not wide:
                add_in_order([flat], flat, divisor, accumulate)
                steps = iter(())
            else:
                steps = self._sum(flat, wide, divisor, accumulate, plan)
            works.append(self._begin(_then(steps, partial(_give_back, flat, group))))
        names = "x".join(self._names[axis] for axis in numbers) or "nothing"
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return watch(_All(works), op, lambda: f"{len(tensors)} tensor(s) over {names}", nbytes, begun)

    def plan_for(self, nbytes: int, axes: int | str | Sequence[int | str]) -> str:
        """Return the plan that a sum of so many bytes over some axes takes; every rank calls it, as `all_reduce`."""
        wide = wide_axes(self.mesh, axis_numbers(self.mesh, axes))
        if len(wide) < 2:
            return "flat"
        names = [self._names[axis] for axis in wide]
        # On the CPU only a transport knows of what kind it is; that over all axes is made for "flat" in any case.
        kind = "nccl" if self.device.type != "cpu" else self.transport_over(wide).name
        costs = self._costs or default_costs(kind, self._names)
        return choose_plan(nbytes, names, self._sizes, costs)

    def transport_over(self, axes: tuple[int, ...], later: bool = False) -> Transport:
        """Return the transport over the ranks along some axes; every rank calls it at the same place.

        Args:
            axes: indices, increasing, each with more than one rank.
            later: for steps that begin in `wait`. These have transports of their own: what other calls begin meanwhile
                depends on when a rank waits, and collectives of one transport must come in the same order everywhere.
        """
        found = self._transports.get((axes, later))
        if found is None:
            if self._last is not None:
                self._last.wait()  # making one blocks, and another rank may wait for later steps of what is under way
            if axes not in self._groups:
                self._groups[axes] = group_over(self.mesh, axes)
            found = transport(self._groups[axes], self._kind, order=self._order, device=self.device)
            self._transports[axes, later] = found
        return found

    def close(self) -> None:
        """Give back what the transports hold; all ranks call it, with nothing under way."""
        if self._last is not None:
            self._last.wait()
        for one in self._transports.values():
            one.close()
        self._transports.clear()

    def _check(self, tensors: Sequence[Tensor], op: str, divisor: float, plan: str | None) -> None:
        if op not in OPERATIONS:
            raise ValueError(f"op: needs one of {', '.join(OPERATIONS)}; got {op!r}.")
        if plan is not None and plan not in PLANS:
            raise ValueError(f"plan: needs one of {', '.join(PLANS)} or None; got {plan!r}.")
        if op in _COMBINE and divisor != 1:
            raise ValueError(f"divisor: only sums are divided, but op is {op!r} and divisor {divisor}.")
        for number, tensor in enumerate(tensors):
            what = f"tensor {number} of shape {tuple(tensor.shape)}"
            if tensor.device.type != self.device.type:
                raise CommError(f"{what} is on {tensor.device}, but the mesh is one of {self.device.type}: move it.")
            if tensor.layout is not torch.strided:
                raise ValueError(f"{what} is {tensor.layout}; only dense tensors are reduced.")
            if op in ("sum", "avg") and tensor.dtype == torch.bool:
                raise ValueError(f"{what} holds truth values, which do not add up: convert it, or use op 'max'.")
            if op in ("min", "max") and tensor.dtype.is_complex:
                raise ValueError(f"{what} holds complex numbers, which have no {op}.")

    def _begin(self, steps: Steps) -> Work:
        before = self._last if self._last is not None and not self._last.finished else None
        self._last = Ordered(steps, before)
        return self._last

    def _sum(
        self, flat: Tensor, axes: tuple[int, ...], divisor: float, accumulate: torch.dtype | None, plan: str | None
    ) -> Steps:
        # Transports are made here, not in steps: making one is a matter of all its ranks as well.
        exact = accumulate in (None, flat.dtype)
        plan = (plan or self.plan_for(flat.nbytes, axes)) if exact and len(axes) > 1 else "flat"
        if plan == "flat":
            return _flat_sum(flat, self.transport_over(axes), divisor, accumulate)
        inner = self.transport_over(axes[-1:])
        outer = {axis: self.transport_over((axis,), later=True) for axis in axes}
        if plan == "axes":
            return _sum_by_axes(flat, [inner, *(outer[axis] for axis in axes[-2::-1])], divisor)
        return _sum_nested(flat, inner, [outer[axis] for axis in reversed(axes)], divisor)

    def _combine(self, flat: Tensor, axes: tuple[int, ...], combine: Callable[[Tensor, Tensor], Tensor]) -> Steps:
        if not axes:
            return iter(())
        first = self.transport_over(axes)
        window = max(1, ROOM // (first.size * flat.element_size()))
        rest = self.transport_over(axes, later=True) if flat.numel() > window else first
        return _combine_windows(torch.split(flat, window), first, rest, combine)


def _flat_sum(flat: Tensor, over: Transport, divisor: float, accumulate: torch.dtype | None) -> Steps:
    yield over.all_reduce(flat, divisor=divisor, accumulate=accumulate)


def _sum_by_axes(flat: Tensor, along: Sequence[Transport], divisor: float) -> Steps:
    for number, over in enumerate(along):
        yield over.all_reduce(flat, divisor=divisor if number == len(along) - 1 else 1)


def _sum_nested(flat: Tensor, inner: Transport, along: Sequence[Transport], divisor: float) -> Steps:
    """Sum by parts.

    Args:
        flat: the numbers.
        inner: over the ranks of the last axis, for the first step.
        along: over the ranks of each axis, the last one first, for all other steps.
        divisor: of the sum.
    """
    shares = 1
    for over in along[:-1]:
        shares *= over.size
    padding = -flat.numel() % shares
    whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    levels = [whole]
    for number, over in enumerate(along[:-1]):
        yield (over if number else inner).reduce_scatter(levels[-1])
        levels.append(levels[-1].tensor_split(over.size)[over.rank])
    yield along[-1].all_reduce(levels[-1], divisor=divisor)
    for over, level in zip(along[-2::-1], levels[-2::-1], strict=True):
        yield over.all_gather(level)
    if padding:
        flat.copy_(whole[: flat.numel()])


def _combine_windows(
    windows: Sequence[Tensor], first: Transport, rest: Transport, combine: Callable[[Tensor, Tensor], Tensor]
) -> Steps:
    over = first
    for window in windows:
        gathered = window.new_empty(over.size * window.numel())
        parts = gathered.tensor_split(over.size)
        parts[over.rank].copy_(window)
        yield over.all_gather(gathered)
        total = parts[0]
        for part in parts[1:]:
            total = combine(total, part)
        window.copy_(total)
        over = rest


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat tensor of all numbers: the memory of a single contiguous tensor itself, or a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous() and not tensors[0].is_conj() and not tensors[0].is_neg():
        return tensors[0].view(-1)
    return torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])


def _give_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].data_ptr() == flat.data_ptr():
        return
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)])


def _then(steps: Steps, last: Callable[[], None]) -> Steps:
    yield from steps
    last()


class _All:
    """Several collectives."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Finish them."""
        for work in self._works:
            work.wait()
