"""The collectives of an emulated group: for each, what a rank contributes, where results go, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import sums
from .exchange import Operation
from .orders import Order

__all__ = [
    "all_gather",
    "all_gather_tensors",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensors",
    "scatter",
]

Results = list[list[Tensor]]
Factor = float | Tensor | None


def all_reduce(order: Order, tensors: Sequence[Tensor], op: str, factor: Factor, *, coalesced: bool) -> Operation:
    """Sum tensors in place, as one collective."""

    def finish(inputs: Results) -> Results:
        return [sums.all_reduce_coalesced(order, inputs, op, factor)] * len(inputs)

    name = _name("all_reduce", coalesced, tensors)
    return Operation(name, f"{name}({op}) of {_sizes(tensors)}", tensors, tensors, finish, op, by_memory=True)


def reduce(order: Order, tensor: Tensor, op: str, factor: Factor, root: int, rank: int, world: int) -> Operation:
    """Sum tensors at one rank; what the others hold afterwards is up to the backend."""
    is_written = rank == root or (order.leaves_partial_sums and world > 1)

    def finish(inputs: Results) -> Results:
        totals = sums.reduce(order, [tensors[0] for tensors in inputs], root, op, factor)
        return [[] if total is None else [total] for total in totals]

    agreed = f"reduce({op}) to rank {root} of {_sizes([tensor])}"
    outputs, shown = ([tensor] if is_written else []), ([tensor] if rank == root else [])
    return Operation("reduce", agreed, [tensor], outputs, finish, op, shown, by_memory=True)


def broadcast(tensors: Sequence[Tensor], root: int, rank: int) -> Operation:
    """Copy the tensors of one rank to the others."""

    def finish(inputs: Results) -> Results:
        return [[] if other == root else inputs[root] for other in range(len(inputs))]

    sent, written = (tensors, ()) if rank == root else ((), tensors)
    agreed = f"broadcast from rank {root} of {_sizes(tensors)}"
    return Operation("broadcast", agreed, sent, written, finish, shown=tensors, by_memory=True)


def all_gather(outputs: Sequence[Tensor], tensor: Tensor) -> Operation:
    """Copy the tensor of each rank into lists on all ranks."""

    def finish(inputs: Results) -> Results:
        return [[tensors[0] for tensors in inputs]] * len(inputs)

    return Operation("all_gather", f"all_gather of {_sizes([tensor])}", [tensor], outputs, finish)


def all_gather_tensors(outputs: Sequence[Tensor], tensors: Sequence[Tensor], *, coalesced: bool) -> Operation:
    """Copy the tensors of all ranks behind each other into one tensor, for each of several tensors."""

    def finish(inputs: Results) -> Results:
        columns = zip(*inputs, strict=True)
        return [[torch.cat([tensor.reshape(-1) for tensor in column]) for column in columns]] * len(inputs)

    name = _name("all_gather_into_tensor", coalesced, tensors)
    return Operation(name, f"{name} of {_sizes(tensors)}", tensors, outputs, finish)


def gather(outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Operation:
    """Copy the tensor of each rank into a list on one rank."""

    def finish(inputs: Results) -> Results:
        return [[tensors[0] for tensors in inputs] if rank == root else [] for rank in range(len(inputs))]

    return Operation("gather", f"gather to rank {root} of {_sizes([tensor])}", [tensor], outputs, finish)


def scatter(output: Tensor, tensors: Sequence[Tensor], root: int) -> Operation:
    """Give each rank one tensor of the list of one rank."""

    def finish(inputs: Results) -> Results:
        return [[inputs[root][rank]] for rank in range(len(inputs))]

    return Operation("scatter", f"scatter from rank {root} of {_sizes([output])}", tensors, [output], finish)


def reduce_scatter(order: Order, output: Tensor, tensors: Sequence[Tensor], op: str, factor: Factor) -> Operation:
    """Sum the lists of the ranks and give each rank one tensor of the result."""

    def finish(inputs: Results) -> Results:
        return [[total] for total in sums.reduce_scatter(order, inputs, op, factor)]

    return Operation("reduce_scatter", f"reduce_scatter({op}) of {_sizes(tensors)}", tensors, [output], finish, op)


def reduce_scatter_tensors(
    order: Order,
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    op: str,
    factor: Factor,
    *,
    coalesced: bool,
) -> Operation:
    """Sum tensors that hold one part per rank and give each rank its part, for each of several tensors."""

    def finish(inputs: Results) -> Results:
        columns = zip(*inputs, strict=True)
        parts = [sums.reduce_scatter_tensor(order, column, op, factor) for column in columns]
        return [[part[rank] for part in parts] for rank in range(len(inputs))]

    name = _name("reduce_scatter_tensor", coalesced, tensors)
    return Operation(name, f"{name}({op}) of {_sizes(tensors)}", tensors, outputs, finish, op)


def all_to_all(name: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Operation:
    """Give tensor j of rank i to rank j, as its tensor i."""

    def finish(inputs: Results) -> Results:
        return [[tensors[rank] for tensors in inputs] for rank in range(len(inputs))]

    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "nothing"
    return Operation(name, f"{name} of {dtype}", tensors, outputs, finish)


def barrier() -> Operation:
    """Wait for each other."""
    return Operation("barrier", "barrier", (), (), lambda inputs: [[]] * len(inputs))


def _name(name: str, coalesced: bool, tensors: Sequence[Tensor]) -> str:
    """Return the name of a collective; functional collectives call the coalesced ones for one tensor, too."""
    return f"{name}_coalesced" if coalesced and len(tensors) > 1 else name


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and numbers of elements; backends do not ask for more than that."""
    texts = [f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors[:4]]
    return ", ".join(texts) + (f", ... ({len(tensors)} tensors)" if len(tensors) > 4 else "")
