"""What collectives cost along one mesh axis: `alpha + beta * bytes`, and how that grows with the number of ranks.

Models as in Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..errors import PlanError
from .host import HostCosts

__all__ = ["ALGORITHMS", "OPERATIONS", "AxisCost", "MeshCosts", "rounds", "volume"]

ALGORITHMS = ("ring", "direct", "tree")
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
MESSAGE = 0.25
"""Of the latency of a message, the part that each further message costs that a rank sends at the same time."""


def rounds(operation: str, ranks: int, algorithm: str) -> float:
    """Return how many latencies of one message a collective takes, one after the other.

    Args:
        operation: of `OPERATIONS`.
        ranks: that take part.
        algorithm: "ring": parts go round; "direct": each rank sends to all others at once; "tree": distances double.

    Example:
        >>> rounds("all_reduce", 8, "ring"), rounds("all_gather", 8, "tree")
        (14.0, 3.0)
    """
    if ranks <= 1:
        return 0.0
    once = {
        "ring": ranks - 1,
        "direct": 1 + MESSAGE * (ranks - 2),
        "tree": math.ceil(math.log2(ranks)),
    }[algorithm]
    return float(2 * once if operation == "all_reduce" else once)


def volume(operation: str, ranks: int) -> float:
    """Return how many bytes each rank sends, as a share of the buffer.

    Example:
        >>> volume("reduce_scatter", 4), volume("all_reduce", 4)
        (0.75, 1.5)
    """
    if ranks <= 1:
        return 0.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class AxisCost:
    """Costs of collectives along one mesh axis, or over several taken together.

    Example:
        >>> link = AxisCost.of_link(alpha=5e-6, bandwidth=45e9)
        >>> round(link.seconds("all_gather", 436e6, ranks=64) * 1e3, 1)  # a layer of Llama-3-8B in bfloat16, in ms
        9.9
    """

    ranks: int
    """Number of ranks for which the numbers hold."""
    operations: Mapping[str, tuple[float, float]]
    """By operation: seconds that it takes however small the buffer is, and seconds per byte of the buffer."""
    algorithm: str = "ring"
    """By which the numbers are carried over to other numbers of ranks."""
    beside: Mapping[str, tuple[float, float]] | None = None
    """As `operations`, by how much they make a computation longer that goes on meanwhile; None: that is not known."""

    stages: bool = False
    """Whether a buffer that is no memory of the transport is copied into such, as where ranks share memory."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            PlanError: an unknown algorithm, a missing operation or a negative number.
        """
        if self.algorithm not in ALGORITHMS:
            raise PlanError(f"algorithm: needs one of {', '.join(ALGORITHMS)}; got {self.algorithm!r}.")
        if self.ranks < 2:
            raise PlanError(f"ranks: costs hold for 2 ranks or more; got {self.ranks}.")
        for kind, costs in (("operations", self.operations), ("beside", self.beside)):
            if costs is None:
                continue
            missing = [name for name in OPERATIONS if name not in costs]
            if missing:
                raise PlanError(f"{kind}: there is no cost of {', '.join(missing)}.")
            for name, numbers in costs.items():
                if not all(math.isfinite(number) and number >= 0 for number in numbers):
                    raise PlanError(f"{kind}: the cost of {name} is {numbers}; needs two finite numbers from 0 on.")

    @classmethod
    def of_link(cls, alpha: float, bandwidth: float, add: float = 0.0, algorithm: str = "ring") -> AxisCost:
        """Make the costs from what a network does.

        Args:
            alpha: seconds that a message takes however small it is.
            bandwidth: bytes per second that a rank sends.
            add: seconds per byte for adding what arrived.
            algorithm: see `rounds`.

        Raises:
            PlanError: a number makes no sense.
        """
        if not bandwidth > 0:
            raise PlanError(f"bandwidth: needs bytes per second above 0; got {bandwidth}.")
        beta = 0.5 / bandwidth
        return cls(
            2,
            {
                "reduce_scatter": (alpha, beta + add / 2),
                "all_gather": (alpha, beta),
                "all_reduce": (2 * alpha, 2 * beta + add / 2),
            },
            algorithm,
        )

    def seconds(self, operation: str, nbytes: float, ranks: int | None = None) -> float:
        """Return how long a collective takes.

        Args:
            operation: of `OPERATIONS`.
            nbytes: of the whole buffer.
            ranks: that take part; None: as many as the numbers hold for.
        """
        return self._of(self.operations, operation, nbytes, ranks)

    def seconds_beside(self, operation: str, nbytes: float, ranks: int | None = None) -> float:
        """Return by how much a collective makes a computation longer that goes on meanwhile; see `seconds`.

        Where that is not known, none of it is hidden.
        """
        return self._of(self.beside or self.operations, operation, nbytes, ranks)

    def _of(self, costs: Mapping[str, tuple[float, float]], operation: str, nbytes: float, ranks: int | None) -> float:
        if ranks is not None and ranks < 2:
            return 0.0
        if operation not in costs:
            raise PlanError(f"operation: needs one of {', '.join(costs)}; got {operation!r}.")
        alpha, beta = costs[operation]
        if ranks is not None and ranks != self.ranks:
            alpha *= rounds(operation, ranks, self.algorithm) / rounds(operation, self.ranks, self.algorithm)
            beta *= volume(operation, ranks) / volume(operation, self.ranks)
        return alpha + beta * nbytes


@dataclass(frozen=True, slots=True)
class MeshCosts:
    """Costs along the axes of a mesh, and over several of them taken together where that is known."""

    axes: Mapping[tuple[str, ...], AxisCost]
    """By names of axes, in the order of the mesh; axes of one rank cost nothing and are left out."""
    host: HostCosts = field(default_factory=HostCosts)
    """What a rank does besides; all zero: that is not known."""

    def of(self, names: Sequence[str], sizes: Mapping[str, int]) -> AxisCost:
        """Return the costs over some axes taken together: known ones, or those of the slowest axis.

        Args:
            names: of the axes.
            sizes: number of ranks of all axes.

        Raises:
            PlanError: nothing is known of an axis.
        """
        wide = tuple(name for name in names if sizes[name] > 1)
        found = self.axes.get(wide)
        if found is not None:
            return found
        missing = [name for name in wide if (name,) not in self.axes]
        if missing or not wide:
            known = ", ".join("x".join(key) for key in self.axes) or "none"
            raise PlanError(f"costs: nothing is known of the mesh axis {', '.join(missing or names)}; known: {known}.")
        ranks = math.prod(sizes[name] for name in wide)
        single = [self.axes[name,] for name in wide]
        measured = all(cost.beside is not None for cost in single)
        slowest = _slowest([cost.seconds for cost in single], ranks)
        beside = _slowest([cost.seconds_beside for cost in single], ranks) if measured else None
        return AxisCost(ranks, slowest, single[0].algorithm, beside, any(cost.stages for cost in single))

    def to_json(self) -> str:
        """Return the numbers as text, for another run."""
        rows = [
            {
                "axes": list(names),
                "ranks": cost.ranks,
                "algorithm": cost.algorithm,
                "operations": dict(cost.operations),
                "beside": None if cost.beside is None else dict(cost.beside),
                "stages": cost.stages,
            }
            for names, cost in self.axes.items()
        ]
        return json.dumps({"axes": rows, "host": asdict(self.host)})

    @classmethod
    def from_json(cls, text: str) -> MeshCosts:
        """Read what `to_json` wrote.

        Raises:
            PlanError: it is something else.
        """
        try:
            told = json.loads(text)
            axes = {
                tuple(row["axes"]): AxisCost(
                    row["ranks"],
                    _pairs(row["operations"]),
                    row["algorithm"],
                    _pairs(row["beside"] or {}) or None,
                    row["stages"],
                )
                for row in told["axes"]
            }
            return cls(axes, HostCosts.of_mapping(told["host"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"These are no costs of a mesh: {type(error).__name__}: {error}") from None


def _pairs(numbers: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    return {name: (float(alpha), float(beta)) for name, (alpha, beta) in numbers.items()}


def _slowest(of_axes: Sequence[Callable[[str, float, int], float]], ranks: int) -> dict[str, tuple[float, float]]:
    """Return latency and time per byte by operation, of the axis where it is largest."""
    found = {}
    for operation in OPERATIONS:
        ends = [(seconds(operation, 0, ranks), seconds(operation, 1e9, ranks)) for seconds in of_axes]
        found[operation] = (max(small for small, _ in ends), max(large - small for small, large in ends) / 1e9)
    return found
