"""Sharding rules, one module per family of operators; importing this package registers them all."""

from . import attributes, gradients, matmul, pointwise

__all__ = ["attributes", "gradients", "matmul", "pointwise"]
