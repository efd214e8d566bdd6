"""Parallel plans: distributing the parameters of a module and the tensors that flow through it."""

from .parallelize import parallelize_module
from .registry import register_plan

__all__ = ["parallelize_module", "register_plan"]
