"""In which order a backend adds: a plan of plain integers that says, for every run of elements, who adds what to what.

A plan is independent of torch, so it can be printed and checked for any world; `sums` carries it out on tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CanonicalOrder", "Node", "Order", "Segment", "chain", "divide_up", "round_up"]


@dataclass(frozen=True, slots=True)
class Node:
    """What one rank does: it takes its own numbers and combines them with what its children hand it, one by one."""

    rank: int
    """Whose numbers."""
    children: tuple[Node, ...] = ()
    """From whom it receives, in the order in which it adds."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of a flat buffer that are all reduced the same way."""

    start: int
    """First element."""
    stop: int
    """First element behind them."""
    root: Node
    """Where their reduction ends."""


def chain(ranks: Iterable[int]) -> Node:
    """Return a reduction that travels from rank to rank; the first one only sends, the last one has the result.

    Example:
        >>> chain([2, 0, 1])
        Node(rank=1, children=(Node(rank=0, children=(Node(rank=2, children=()),)),))
    """
    node: Node | None = None
    for rank in ranks:
        node = Node(rank, () if node is None else (node,))
    if node is None:
        raise ValueError("ranks: is empty, but a chain needs at least one rank.")
    return node


def divide_up(value: int, divisor: int) -> int:
    """Return `value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return divide_up(value, multiple) * multiple


class Order:
    """How one backend adds; base of all orders. An order is immutable and equal to others of the same parameters."""

    name: str
    """What the user writes to choose it."""
    backend: str
    """What torch.distributed.get_backend() says in an emulated world with this order."""
    verified = False
    """Whether the plan was compared bit for bit with the backend."""
    joins_coalesced = False
    """Whether a coalesced all_reduce is one of all tensors behind each other, instead of one per tensor."""
    scatters_lists_one_by_one = False
    """Whether a reduce_scatter of lists is one all_reduce per tensor, instead of one of all of them in one buffer."""
    leaves_partial_sums = False
    """Whether a reduce to one rank overwrites the buffers of the others with what passed through them."""

    def segments(self, collective: str, numel: int, itemsize: int, world: int, root: int = 0) -> tuple[Segment, ...]:
        """Return the plan of one collective.

        Args:
            collective: "all_reduce", "reduce_scatter" (of one buffer with a part per rank) or "reduce".
            numel: number of elements of the whole buffer.
            itemsize: bytes per element.
            world: number of ranks.
            root: for "reduce", the rank that gets the result.

        Returns:
            Segments by offset; together they cover every element once.
        """
        raise NotImplementedError

    def before(self, terms: Sequence[Tensor], op: str, factor: float | Tensor | None) -> Sequence[Tensor]:
        """Return what the ranks contribute: `terms`, or what the backend makes of them before it adds.

        Raises:
            RuntimeError: the backend has no such operation for this dtype.
        """
        if op == "premul_sum":
            raise RuntimeError(f"{self.name}: this backend has no premul_sum; multiply before you reduce.")
        return terms

    def after(self, total: Tensor, op: str, world: int) -> Tensor:
        """Return the result, given what the reduction ended with."""
        return total.div_(world) if op == "avg" else total

    def carries(self, dtype: torch.dtype) -> bool:
        """Tell whether the collectives of the backend take this dtype."""
        return True


@dataclass(frozen=True, slots=True)
class CanonicalOrder(Order):
    """Rank order, `((x[0] + x[1]) + x[2]) + ...`: what the transports of this package compute by default."""

    name = "canonical"
    backend = "gloo"
    verified = True

    def segments(self, collective: str, numel: int, itemsize: int, world: int, root: int = 0) -> tuple[Segment, ...]:
        """Return one segment, a chain through the ranks; see `Order.segments`."""
        return (Segment(0, numel, chain(range(world))),)
