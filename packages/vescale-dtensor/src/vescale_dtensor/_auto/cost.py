"""What a plan costs: bytes and messages on each mesh axis, work per rank, memory per rank.

Communication follows the alpha-beta model: a collective takes `latency` seconds plus its bytes on the wire over
the `bandwidth` of the slowest axis that it spans. Bytes on the wire are those of ring algorithms (Thakur et al.
2005, "Optimization of collective communication operations in MPICH").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Totals = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""Number and bytes of collectives by kind and mesh axes, as `explain().totals()` gives them."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank can send along a mesh axis."""

    latency: float = 2e-5
    """Seconds that a collective takes apart from its data (alpha)."""
    bandwidth: float = 1e10
    """Bytes per second that a rank sends (the inverse of beta)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank can do."""

    link: Link = Link()
    """For axes that `links` does not name."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """By name of the mesh axis, or its number as text."""
    flops: float = 1e12
    """Floating point operations per second in matrix products."""
    memory_bandwidth: float = 1e11
    """Bytes per second to and from memory."""

    def seconds(self, kind: str, num_bytes: float, num_ranks: int, axes: tuple[str, ...]) -> float:
        """Seconds of one collective."""
        links = [self.links.get(a, self.link) for a in axes]
        latency, bandwidth = max(x.latency for x in links), min(x.bandwidth for x in links)
        messages = 2 if kind == "all_reduce" else 1  # a reduce-scatter and an all-gather
        return messages * latency + wire_bytes(kind, num_bytes, num_ranks) / bandwidth


DEVICES = {
    "cpu": Machine(Link(2e-5, 2e9), flops=5e10, memory_bandwidth=1e10),
    "cuda": Machine(Link(1e-5, 1e11), flops=4e14, memory_bandwidth=2e12),
}
"""By type of device, where the caller gives no figures: orders of magnitude."""


def wire_bytes(kind: str, num_bytes: float, num_ranks: int) -> float:
    """Bytes that one rank sends in a collective.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        num_bytes: bytes of the rank's input.
        num_ranks: ranks that take part.

    >>> wire_bytes("all_reduce", 100, 4), wire_bytes("all_gather", 25, 4), wire_bytes("reduce_scatter", 100, 4)
    (150.0, 75, 75.0)
    """
    if kind == "all_reduce":
        return 2 * num_bytes * (num_ranks - 1) / num_ranks
    if kind == "all_gather":
        return num_bytes * (num_ranks - 1)
    return num_bytes * (num_ranks - 1) / num_ranks


@dataclass(frozen=True, slots=True)
class Cost:
    """What one training step costs the rank that holds the largest shards."""

    totals: Totals
    """Collectives by kind and axes; bytes are those of the rank's input."""
    sent: float
    """Bytes that the rank sends, by ring algorithms."""
    communication: float
    """Seconds of the collectives."""
    flops: float
    """Floating point operations in matrix products and convolutions."""
    touched: float
    """Bytes that operators and the optimizer read and write, about."""
    implicit: int
    """Number of collectives that no entry of the plan asks for."""
    parameters: int
    """Bytes of the rank's parameters."""
    state: int
    """Bytes of parameters, gradients and two moments for an optimizer."""
    activations: int
    """Bytes that autograd keeps for the backward pass."""

    @property
    def memory(self) -> int:
        """Bytes of all that is held at the end of the forward pass."""
        return self.state + self.activations
