"""Models of the orders in which NCCL adds. Unverified: no machine with several GPUs was at hand to compare bits.

What real NCCL does depends on version, topology, protocol and tuning; these models have that as parameters.
Sources: NCCL's device code (all_reduce.h: ring and tree), graph/trees.cc (double binary trees), graph/connect.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .orders import Node, Order, Segment, chain, divide_up, round_up

__all__ = ["NcclRing", "NcclTree"]

ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class NcclRing(Order):
    """Ring: a chunk starts at the rank behind its owner and travels once around.

    Example:
        >>> [part.root.rank for part in NcclRing(channels=1).segments("all_reduce", 8, 4, 2)]
        [0, 1]
    """

    channels: int = 2
    """Number of rings that share the buffer, each with one contiguous part."""
    chunk_bytes: int = 1 << 19
    """Largest chunk that one rank owns in one turn of the loop."""
    ring: tuple[int, ...] | None = None
    """Ranks in the order of the ring; None: 0, 1, 2, ..."""

    name = "nccl_ring"
    backend = "nccl"

    def segments(self, collective: str, numel: int, itemsize: int, world: int, root: int = 0) -> tuple[Segment, ...]:
        """Return a segment per channel, loop and rank; see `Order.segments`."""
        ring = tuple(range(world)) if self.ring is None else self.ring
        if sorted(ring) != list(range(world)):
            raise ValueError(f"ring: must hold each rank of {world} once; got {ring}.")
        at = {rank: place for place, rank in enumerate(ring)}
        if collective == "reduce":
            return (Segment(0, numel, chain(_around(ring, at[root]))),)
        if collective == "reduce_scatter":
            part = numel // world
            return tuple(Segment(r * part, (r + 1) * part, chain(_around(ring, at[r]))) for r in range(world) if part)
        found: list[Segment] = []
        for begin, end in channel_parts(numel, itemsize, self.channels):
            found += self._loops(begin, end, itemsize, ring)
        return tuple(found)

    def _loops(self, begin: int, end: int, itemsize: int, ring: tuple[int, ...]) -> list[Segment]:
        world, align = len(ring), max(1, ALIGN_BYTES // itemsize)
        full = max(align, self.chunk_bytes // itemsize // align * align)
        found = []
        while begin < end:
            chunk = full
            if end - begin < world * full:
                chunk = round_up(divide_up(end - begin, world), align)
            for place in range(world):
                start, stop = begin + place * chunk, min(begin + (place + 1) * chunk, end)
                if start < stop:
                    found.append(Segment(start, stop, chain(_around(ring, place))))
            begin += world * chunk
        return found

    def before(self, terms: Sequence[Tensor], op: str, factor: float | Tensor | None) -> Sequence[Tensor]:
        """Multiply by the factor before adding; an average is a sum of terms divided by the number of ranks."""
        if op == "avg" and terms[0].is_floating_point():
            return [term * (1 / len(terms)) for term in terms]
        if op == "premul_sum":
            if factor is None:
                raise ValueError("factor: premul_sum needs one.")
            return [term * factor for term in terms]
        return terms

    def after(self, total: Tensor, op: str, world: int) -> Tensor:
        """Divide an average of integers, which could not be divided before; see `Order.after`."""
        if op == "avg" and not total.is_floating_point():
            return total.div_(world, rounding_mode="trunc")
        return total


@dataclass(frozen=True, slots=True)
class NcclTree(Order):
    """Double binary tree over the nodes, a chain in each node; reduce and reduce_scatter use the ring.

    The first half of a buffer goes through one tree, the second half through the other, which is the first one
    mirrored (even number of nodes) or shifted by one (odd).
    """

    ranks_per_node: int = 1
    """Ranks that share a node; they are a chain that ends at the first of them."""
    ring: NcclRing = field(default_factory=NcclRing)
    """What reduce and reduce_scatter use."""

    name = "nccl_tree"
    backend = "nccl"

    def segments(self, collective: str, numel: int, itemsize: int, world: int, root: int = 0) -> tuple[Segment, ...]:
        """Return the two halves; see `Order.segments`."""
        if collective != "all_reduce":
            return self.ring.segments(collective, numel, itemsize, world, root)
        if world % self.ranks_per_node:
            raise ValueError(f"ranks_per_node: {self.ranks_per_node} does not divide the {world} ranks of the group.")
        nodes = world // self.ranks_per_node
        roots = [self._tree(tree, nodes) for tree in (0, 1)]
        parts = channel_parts(numel, itemsize, 2)
        return tuple(Segment(start, stop, root) for (start, stop), root in zip(parts, roots, strict=False))

    def _tree(self, tree: int, nodes: int) -> Node:
        below: dict[int, list[int]] = {node: [] for node in range(nodes)}
        top = _relabel(0, tree, nodes)
        for node in range(1, nodes):
            below[_relabel(_parent(node, nodes), tree, nodes)].append(_relabel(node, tree, nodes))
        return self._node(top, below)

    def _node(self, node: int, below: dict[int, list[int]]) -> Node:
        first = node * self.ranks_per_node
        inside = () if self.ranks_per_node == 1 else (chain(range(first + self.ranks_per_node - 1, first, -1)),)
        return Node(first, inside + tuple(self._node(child, below) for child in below[node]))

    def before(self, terms: Sequence[Tensor], op: str, factor: float | Tensor | None) -> Sequence[Tensor]:
        """Multiply before adding, as the ring does."""
        return self.ring.before(terms, op, factor)

    def after(self, total: Tensor, op: str, world: int) -> Tensor:
        """Finish as the ring does."""
        return self.ring.after(total, op, world)


def channel_parts(numel: int, itemsize: int, channels: int) -> list[tuple[int, int]]:
    """Return the contiguous parts of a buffer that the channels carry, cut at multiples of 16 bytes.

    Example:
        >>> channel_parts(10, 4, 2)
        [(0, 8), (8, 10)]
    """
    align = max(1, ALIGN_BYTES // itemsize)
    part = round_up(divide_up(numel, channels), align)
    return [(start, min(start + part, numel)) for start in range(0, numel, part or 1)]


def _around(ring: tuple[int, ...], owner: int) -> list[int]:
    """Return the ranks of the ring, beginning behind the owner and ending with it."""
    return [ring[(owner + hop) % len(ring)] for hop in range(1, len(ring) + 1)]


def _parent(node: int, nodes: int) -> int:
    """Return the parent of a node > 0 in the binary tree whose leaves are the odd numbers."""
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < nodes else node ^ bit


def _relabel(node: int, tree: int, nodes: int) -> int:
    if tree == 0:
        return node
    return nodes - 1 - node if nodes % 2 == 0 else (node + 1) % nodes
