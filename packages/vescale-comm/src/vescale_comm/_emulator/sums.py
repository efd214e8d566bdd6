"""What a backend computes from the tensors of all ranks: plans of `orders`, carried out in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .combine import combine, numbers, operation
from .orders import Node, Order

__all__ = ["all_reduce", "all_reduce_coalesced", "identify", "reduce", "reduce_scatter", "reduce_scatter_tensor"]

Factor = float | Tensor | None


def all_reduce(order: Order, inputs: Sequence[Tensor], op: str = "sum", factor: Factor = None) -> Tensor:
    """Return what all_reduce gives, on every rank.

    Args:
        order: of the backend.
        inputs: the tensor of each rank, all of one shape and dtype.
        op: a name such as "sum", or a `ReduceOp`.
        factor: of premul_sum.

    Returns:
        A new tensor of the same shape and dtype.

    Example:
        >>> from vescale_comm.emulator import orders
        >>> terms = [torch.tensor([value]) for value in (1e8, -1e8, 1.0, 1.0)]
        >>> all_reduce(orders["canonical"], terms), all_reduce(orders["gloo"], terms)
        (tensor([2.]), tensor([0.]))
    """
    op = operation(op)
    terms = order.before([numbers(tensor) for tensor in inputs], op, factor)
    total = _fold(order, "all_reduce", terms, op)
    return _like(order.after(total, op, len(inputs)), inputs[0])


def all_reduce_coalesced(
    order: Order, inputs: Sequence[Sequence[Tensor]], op: str = "sum", factor: Factor = None
) -> list[Tensor]:
    """Return what a coalesced all_reduce gives, on every rank, one tensor for each of those that a rank passed.

    Args:
        order: of the backend.
        inputs: by rank, then by tensor.
        op: a name such as "sum", or a `ReduceOp`.
        factor: of premul_sum.
    """
    columns = list(zip(*inputs, strict=True))
    if not order.joins_coalesced or len(columns) == 1:
        return [all_reduce(order, column, op, factor) for column in columns]
    joined = [torch.cat([numbers(tensor) for tensor in tensors]) for tensors in inputs]
    op = operation(op)
    total = order.after(_fold(order, "all_reduce", order.before(joined, op, factor), op), op, len(inputs))
    parts = torch.split(total, [numbers(tensor).numel() for tensor in inputs[0]])
    return [_like(part.clone(), tensor) for part, tensor in zip(parts, inputs[0], strict=True)]


def reduce(
    order: Order, inputs: Sequence[Tensor], root: int, op: str = "sum", factor: Factor = None
) -> list[Tensor | None]:
    """Return what stands in the buffer of each rank after a reduce to `root`; None: it is left alone.

    Args:
        order: of the backend.
        inputs: the tensor of each rank, all of one shape and dtype.
        root: rank that gets the result.
        op: a name such as "sum", or a `ReduceOp`.
        factor: of premul_sum.
    """
    op = operation(op)
    terms = order.before([numbers(tensor) for tensor in inputs], op, factor)
    world = len(inputs)
    totals: list[Tensor | None] = [None] * world
    totals[root] = _fold(order, "reduce", terms, op, root)
    if order.leaves_partial_sums and world > 1:
        totals = _fold_partials(order, terms, op, root, totals[root])
    return [None if total is None else _like(order.after(total, op, world), inputs[0]) for total in totals]


def reduce_scatter_tensor(
    order: Order, inputs: Sequence[Tensor], op: str = "sum", factor: Factor = None
) -> list[Tensor]:
    """Return what reduce_scatter_tensor gives to each rank, flat.

    Args:
        order: of the backend.
        inputs: the buffer of each rank, with one equal part per rank.
        op: a name such as "sum", or a `ReduceOp`.
        factor: of premul_sum.
    """
    op = operation(op)
    terms = order.before([numbers(tensor) for tensor in inputs], op, factor)
    total = order.after(_fold(order, "reduce_scatter", terms, op), op, len(inputs))
    return list(_flat_like(total, inputs[0]).view(len(inputs), -1).unbind())


def reduce_scatter(
    order: Order, inputs: Sequence[Sequence[Tensor]], op: str = "sum", factor: Factor = None
) -> list[Tensor]:
    """Return what reduce_scatter of lists gives to each rank.

    Args:
        order: of the backend.
        inputs: by rank, then by rank that the tensor is for.
        op: a name such as "sum", or a `ReduceOp`.
        factor: of premul_sum.
    """
    columns = list(zip(*inputs, strict=True))
    if order.scatters_lists_one_by_one:
        return [all_reduce(order, column, op, factor) for column in columns]
    joined = [torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) for tensors in inputs]
    parts = reduce_scatter_tensor(order, joined, op, factor)
    return [part.clone().view(column[0].shape) for part, column in zip(parts, columns, strict=True)]


def identify(orders: Sequence[Order], inputs: Sequence[Tensor], output: Tensor, op: str = "sum") -> list[str]:
    """Return the names of the orders that turn these inputs into this output of an all_reduce, bit for bit.

    Args:
        orders: that come into question.
        inputs: the tensor of each rank.
        output: what all_reduce gave.
        op: a name such as "sum", or a `ReduceOp`.
    """
    wanted = numbers(output).view(torch.uint8)
    return [
        order.name for order in orders if torch.equal(numbers(all_reduce(order, inputs, op)).view(torch.uint8), wanted)
    ]


def _fold(order: Order, collective: str, terms: Sequence[Tensor], op: str, root: int = 0) -> Tensor:
    first = terms[0]
    if not order.carries(first.dtype):
        raise RuntimeError(f"{order.name}: the collectives of this backend do not take {first.dtype}.")
    out = torch.empty_like(first)
    for part in order.segments(collective, first.numel(), first.element_size(), len(terms), root):
        out[part.start : part.stop] = _value(part.root, terms, op, part.start, part.stop)
    return out


def _fold_partials(
    order: Order, terms: Sequence[Tensor], op: str, root: int, total: Tensor | None
) -> list[Tensor | None]:
    """Return what passed through every rank, and the result at the root."""
    passed: list[Tensor | None] = [term.clone() for term in terms]
    for part in order.segments("reduce", terms[0].numel(), terms[0].element_size(), len(terms), root):
        node: Node | None = part.root
        while node is not None:
            kept = passed[node.rank]
            if kept is not None:
                kept[part.start : part.stop] = _value(node, terms, op, part.start, part.stop)
            node = node.children[0] if node.children else None
    passed[root] = total
    return passed


def _value(node: Node, terms: Sequence[Tensor], op: str, start: int, stop: int) -> Tensor:
    """Evaluate a plan; a long chain is a loop, since a recursion would be as deep as the world is large."""
    path = [node]
    while len(path[-1].children) == 1:
        path.append(path[-1].children[0])
    last = path.pop()
    value = terms[last.rank][start:stop]
    for child in last.children:
        value = combine(op, value, _value(child, terms, op, start, stop))
    for above in reversed(path):
        value = combine(op, terms[above.rank][start:stop], value)
    return value


def _flat_like(flat: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(flat.view(-1, 2))
    return flat.view(like.dtype)


def _like(flat: Tensor, like: Tensor) -> Tensor:
    return _flat_like(flat, like).view(like.shape)
