"""GPipe: all forwards, then all backwards; and LoopedBFS, the same with several stages a rank."""

from __future__ import annotations

import torch

from .._schedule import Schedule
from ._columns import Slots, interleave

__all__ = ["gpipe", "looped_bfs"]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, micro-batches in order both times.

    Idle per rank: (P-1)(F+B), for any M. Live activations: M. Gradients accumulate in the order of the micro-batches.
    Source: Huang et al., "GPipe" (2019).

    Args:
        num_ranks: P.
        num_microbatches: M.
    """
    return _breadth_first("gpipe", num_ranks, num_microbatches, 1)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """GPipe with v stages a rank: all micro-batches through one chunk before the next chunk begins.

    Idle per rank: (P-1)(F+B)/v if M >= P. Live activations: M (of all v chunks). The backwards of a chunk run in the
    order of the micro-batches, not in reverse as elsewhere: the bubble is the same, and so gradients accumulate in
    the order of the micro-batches here too. Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2023).

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: v, stages a rank.
    """
    return _breadth_first("looped_bfs", num_ranks, num_microbatches, chunks)


def _breadth_first(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    microbatch = torch.arange(num_microbatches).repeat(chunks)
    chunk = torch.arange(chunks).repeat_interleave(num_microbatches)
    ahead = torch.full((num_ranks,), chunks * num_microbatches)
    forward, backward = Slots(chunk, microbatch), Slots(chunks - 1 - chunk, microbatch)
    return interleave(name, num_ranks, num_microbatches, forward, backward, ahead)
