"""Sharded optimizers (ZeRO stages 1 and 2), and norms of gradients over any mix of meshes."""

from .norms import clip_grad_norm_, get_total_norm
from .optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_", "get_total_norm"]
