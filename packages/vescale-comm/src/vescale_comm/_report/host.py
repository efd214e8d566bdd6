"""What data parallelism costs on one rank besides its collectives: copies, new memory, Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import PlanError

__all__ = ["HostCosts"]


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Costs on one rank; `calibrate` measures them.

    Example:
        >>> HostCosts(copy=2e-10, unit=1e-4).unit
        0.0001
    """

    copy: float = 0.0
    """Seconds per byte that is copied from one place in memory to another."""
    fresh: float = 0.0
    """Seconds per byte of memory that is given back and taken anew, more than of memory that stays."""
    hook: float = 0.0
    """Seconds per parameter and step in which gradients go to buckets, besides the copy."""
    unit: float = 0.0
    """Seconds per unit and step of `fully_shard`, besides those per parameter."""
    shard: float = 0.0
    """Seconds per parameter and step of `fully_shard`, besides copies."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            PlanError: a number is negative or not finite.
        """
        for name, number in asdict(self).items():
            if not (isinstance(number, int | float) and math.isfinite(number) and number >= 0):
                raise PlanError(f"{name}: costs are finite numbers from 0 on; got {number!r}.")

    @classmethod
    def of_mapping(cls, numbers: Mapping[str, Any]) -> HostCosts:
        """Make them from numbers by name, such as those read from JSON.

        Raises:
            PlanError: there is no cost of that name.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(numbers) - known)
        if unknown:
            raise PlanError(f"host: there is no cost {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
        return cls(**numbers)
