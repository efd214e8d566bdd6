"""Backward in two parts: gradients of inputs now (I), gradients of weights later (W)."""

from .store import WeightGradStore

__all__ = ["WeightGradStore"]
