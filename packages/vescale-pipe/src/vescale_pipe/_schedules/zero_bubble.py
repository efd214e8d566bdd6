"""Zero bubble on looped placement: weight gradients wait, and fill what 1F1B leaves idle."""

from __future__ import annotations

from .._schedule import Schedule
from ._family import family

__all__ = ["interleaved_zb", "zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble at the memory of 1F1B.

    Idle per rank: (P-1)(F+I-W) if M >= P and W <= F, I. Live activations: min(M, P) on all ranks. Gradients
    accumulate in the order of the micro-batches. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Args:
        num_ranks: P.
        num_microbatches: M.
    """
    return family("zb_h1", num_ranks, num_microbatches, 1, 1.0, 1.0)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble at about twice the memory of 1F1B.

    The rank that is idle longest between its own first and last action is so for (P-1)(F+I-2W), if M >= 2P - 1 and
    W <= F, I; with F = I = W every rank is idle for (P-1)F between the first start and the last end of all. Live
    activations, at most: min(M, 2P - 1). Gradients accumulate in the order of the micro-batches. Source: Qi
    et al., "Zero Bubble Pipeline Parallelism" (2023).

    Args:
        num_ranks: P.
        num_microbatches: M.
    """
    return family("zb_h2", num_ranks, num_microbatches, 1, 2.0, 2.0)


def interleaved_zb(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-H1 with v stages a rank.

    Micro-batches go in rounds as in interleaved 1F1B. Idle per rank: (P-1)(F+I-W)/v if M >= P and W <= F, I. Live
    activations on all ranks, in units of one rank's layers: min(M v, (v-1)R + P)/v, where R is the largest round: P
    if P divides M. Gradients accumulate in the order of the micro-batches. Source: torch's schedule of the same name
    is one of this family; the idea is in Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: v, stages a rank.
    """
    return family("interleaved_zb", num_ranks, num_microbatches, chunks, 1.0, 1.0)
