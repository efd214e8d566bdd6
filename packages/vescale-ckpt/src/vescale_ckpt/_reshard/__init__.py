"""Other layouts for a state, over the network."""

from .reshard import NewLayout, reshard

__all__ = ["NewLayout", "reshard"]
