"""Expert parallelism: experts of a mixture live on different ranks, tokens travel to them by all-to-all."""

from .allocator import ExpertsAllocator, Move
from .plans import expert_parallel

__all__ = ["ExpertsAllocator", "Move", "expert_parallel"]
