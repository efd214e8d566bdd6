"""Collectives over any set of axes of a mesh, and what they cost."""

from .entry import calibrate, reduce_over
from .plans import PLANS, choose_plan, default_costs, plan_seconds
from .reducer import MeshReducer

__all__ = ["PLANS", "MeshReducer", "calibrate", "choose_plan", "default_costs", "plan_seconds", "reduce_over"]
