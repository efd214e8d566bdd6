"""Ways to reduce over several mesh axes, what each takes, and the choice between them.

The choice depends on sizes and given costs only, never on the clock, so that all ranks make the same one in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .._report.costs import AxisCost, MeshCosts

__all__ = ["PLANS", "choose_plan", "default_costs", "plan_seconds"]

PLANS = ("flat", "axes", "nested")
"""All ranks as one group; one axis after the other; reduce-scatter inside, all-reduce outside, all-gather inside."""

CALL = 2e-5
"""Seconds that the host takes to begin a collective."""

_DEFAULTS = {
    "p2p": AxisCost.of_link(alpha=60e-6, bandwidth=5e9, add=1e-10, algorithm="direct"),
    "shared": AxisCost.of_link(alpha=30e-6, bandwidth=10e9, add=5e-11, algorithm="direct"),
    "nccl": AxisCost.of_link(alpha=8e-6, bandwidth=45e9),
}
_OTHERS = AxisCost(
    2,
    {"reduce_scatter": (2.7e-4, 6.1e-10), "all_gather": (1.8e-4, 2.9e-10), "all_reduce": (2.2e-4, 4.4e-10)},
)
"""Of gloo's own collectives, where a reduce-scatter costs more than an all-reduce; and of what is not known."""


def default_costs(transport: str, names: Sequence[str]) -> MeshCosts:
    """Return costs for when nothing was measured: orders of magnitude of a kind of transport, equal for all axes.

    Args:
        transport: its name, or that of the backend below it.
        names: of the axes.
    """
    cost = _DEFAULTS.get(transport, _OTHERS)
    return MeshCosts({(name,): cost for name in names})


def plan_seconds(plan: str, nbytes: float, names: Sequence[str], sizes: Mapping[str, int], costs: MeshCosts) -> float:
    """Return how long a sum over several axes takes.

    Args:
        plan: of `PLANS`.
        nbytes: of the buffer.
        names: of the axes to reduce over, in the order of the mesh; the ranks along the last one are nearest.
        sizes: number of ranks of each axis.
        costs: of the axes.
    """
    if plan == "flat":
        ranks = math.prod(sizes[name] for name in names)
        return CALL + costs.of(names, sizes).seconds("all_reduce", nbytes, ranks)
    single = {name: costs.of((name,), sizes) for name in names}
    if plan == "axes":
        return sum(CALL + single[name].seconds("all_reduce", nbytes, sizes[name]) for name in names)
    total, left = (2 * len(names) - 1) * CALL, nbytes
    for name in reversed(names[1:]):
        total += single[name].seconds("reduce_scatter", left, sizes[name])
        total += single[name].seconds("all_gather", left, sizes[name])
        left /= sizes[name]
    return total + single[names[0]].seconds("all_reduce", left, sizes[names[0]])


def choose_plan(nbytes: float, names: Sequence[str], sizes: Mapping[str, int], costs: MeshCosts) -> str:
    """Return the quickest plan; of equal ones the first of `PLANS`.

    Example:
        >>> costs, sizes = default_costs("gloo", ("dp", "tp")), {"dp": 2, "tp": 2}
        >>> choose_plan(64 << 10, ("dp", "tp"), sizes, costs), choose_plan(16 << 20, ("dp", "tp"), sizes, costs)
        ('axes', 'flat')
    """
    wide = [name for name in names if sizes[name] > 1]
    if len(wide) < 2:
        return "flat"
    return min(PLANS, key=lambda plan: plan_seconds(plan, nbytes, wide, sizes, costs))
