"""Pipeline parallelism: schedules as data, and one engine that runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import PipeError, RankError, ScheduleError, SplitError, TransportError

if TYPE_CHECKING:
    from . import timeline
    from ._draw import Bar, render
    from ._engine import PipeEngine
    from ._plan import PipePlan
    from ._runtime.draws import microbatch_seed
    from ._runtime.losses import add_loss
    from ._schedule import (
        Action,
        Kind,
        Problem,
        Schedule,
        from_csv,
        from_json,
        lower,
        parse_action,
        problems,
        recheck,
        to_csv,
        to_json,
        validate,
    )
    from ._schedules import build_schedule, costs_per_stage, schedule_names
    from ._schedules.forward_only import forward_only
    from ._schedules.optimize import optimize
    from ._simulate import Costs, Simulation, simulate
    from ._split import Port, Stage, StageGraph, manual, split

__all__ = [
    "Action",
    "Bar",
    "Costs",
    "Kind",
    "PipeEngine",
    "PipeError",
    "PipePlan",
    "Port",
    "Problem",
    "RankError",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "SplitError",
    "Stage",
    "StageGraph",
    "TransportError",
    "__version__",
    "add_loss",
    "build_schedule",
    "costs_per_stage",
    "forward_only",
    "from_csv",
    "from_json",
    "lower",
    "manual",
    "microbatch_seed",
    "optimize",
    "parse_action",
    "problems",
    "recheck",
    "render",
    "schedule_names",
    "simulate",
    "split",
    "timeline",
    "to_csv",
    "to_json",
    "validate",
]

_HOMES = {
    "_draw": ("Bar", "render"),
    "_engine": ("PipeEngine",),
    "_plan": ("PipePlan",),
    "_runtime.draws": ("microbatch_seed",),
    "_runtime.losses": ("add_loss",),
    "_schedule": (
        *("Action", "Kind", "Problem", "Schedule", "from_csv", "from_json", "lower", "parse_action", "problems"),
        *("recheck", "to_csv", "to_json", "validate"),
    ),
    "_schedules": ("build_schedule", "costs_per_stage", "forward_only", "optimize", "schedule_names"),
    "_simulate": ("Costs", "Simulation", "simulate"),
    "_split": ("Port", "Stage", "StageGraph", "manual", "split"),
}
"""Who looks at schedules on a laptop does not wait for the engine to be imported: each part is, when it is used."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-pipe")
    if name == "timeline":
        return importlib.import_module(".timeline", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
