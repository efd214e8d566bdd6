"""Plans that are found instead of written: rehearse a model on meta tensors, and choose by what it sends."""

from .api import auto_plan, predict
from .cost import Cost, Link, Machine
from .plan import AutoPlan

__all__ = ["AutoPlan", "Cost", "Link", "Machine", "auto_plan", "predict"]
