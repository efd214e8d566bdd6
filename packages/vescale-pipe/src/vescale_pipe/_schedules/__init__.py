"""The schedules that come with this package, those of plugins, and a search for the best one."""

from .forward_only import forward_only
from .optimize import costs_per_stage, optimize
from .registry import build_schedule, schedule_names

__all__ = ["build_schedule", "costs_per_stage", "forward_only", "optimize", "schedule_names"]
