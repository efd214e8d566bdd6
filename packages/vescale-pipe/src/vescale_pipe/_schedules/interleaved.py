"""Interleaved 1F1B: several stages a rank, micro-batches in rounds of about one a rank."""

from __future__ import annotations

from .._schedule import Schedule
from ._family import family

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with v stages a rank: the bubble shrinks by v, and v times as many messages travel.

    Micro-batches go in max(1, M // P) rounds of nearly equal size, the larger ones first; Megatron's schedule is the
    one for M a multiple of P. Idle per rank: (P-1)(F+B)/v if M >= P. Live activations on rank r, in units of one
    rank's layers: min(M v, 2(P-1-r) + (v-1)R + 1)/v, where R is the largest round, P if P divides M. Gradients
    accumulate in the order of the micro-batches. Source: Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (2021).

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: v, stages a rank.
    """
    return family("interleaved_1f1b", num_ranks, num_microbatches, chunks, 2.0)
