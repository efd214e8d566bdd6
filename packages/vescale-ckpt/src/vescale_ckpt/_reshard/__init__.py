"""Other layouts for a state, over the network."""

from .layouts import NewLayout, NewLayouts
from .reshard import reshard

__all__ = ["NewLayout", "NewLayouts", "reshard"]
