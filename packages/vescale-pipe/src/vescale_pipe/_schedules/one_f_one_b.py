"""1F1B (PipeDream-Flush) and its eager form: one stage a rank, each backward as soon as it may run."""

from __future__ import annotations

from .._schedule import Schedule
from ._family import family

__all__ = ["eager_1f1b", "one_f_one_b"]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One forward, one backward, after P - 1 - r forwards on rank r.

    Idle per rank: (P-1)(F+B). Live activations on rank r: min(M, P - r). Both for any M. Gradients accumulate in the
    order of the micro-batches. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021).

    Args:
        num_ranks: P.
        num_microbatches: M.
    """
    return family("1f1b", num_ranks, num_microbatches, 1, 1.0)


def eager_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the forwards in advance, so that messages travel while both ends compute.

    Idle per rank: (P-1)(F+B), as 1F1B. If a message takes L, 1F1B loses 2L(P-1)/P more a micro-batch, since its ranks
    move in lock-step; this one loses nothing more as long as L <= (F+B)/2. Live activations on rank r:
    min(M, 2(P-1-r) + 1). Gradients accumulate in the order of the micro-batches. Source: Zhuang et al., "On Optimizing
    the Communication of Model Parallelism" (2022).

    Args:
        num_ranks: P.
        num_microbatches: M.
    """
    return family("eager_1f1b", num_ranks, num_microbatches, 1, 2.0)
