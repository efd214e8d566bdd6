"""Simulation of schedules: makespan, bubbles, memory, the critical path."""

from .costs import Costs
from .memory import Peak
from .path import PathStep
from .result import Simulation
from .simulate import simulate

__all__ = ["Costs", "PathStep", "Peak", "Simulation", "simulate"]
