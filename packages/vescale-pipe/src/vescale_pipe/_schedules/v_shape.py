"""ZB-V: zero bubble on a V placement, at the memory of 1F1B."""

from __future__ import annotations

from .._schedule import Schedule
from ._columns import Row, first_microbatches, vee

__all__ = ["zb_v"]


def zb_v(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages a rank, down the ranks and back, with split backwards; a rank that has begun never idles.

    With costs of one chunk: idle 0 in each rank's own span and (P-1)F between the first start and the last end of
    all, if M >= 2P and F = I = W. Live activations: min(2M, 2P) chunks, that is P of one rank's layers. With fewer
    micro-batches it is the schedule for 2P without the others. Gradients accumulate in the order of the
    micro-batches. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section on ZB-V.

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: 2, no other number.
    """
    planned = max(num_microbatches, 2 * num_ranks)
    columns = []
    for rank in range(num_ranks):
        after = num_ranks - rank
        row = Row([rank, 2 * num_ranks - 1 - rank])
        row.repeat(2 * after - 1, "F0")
        row.repeat(rank, "F1 F0")
        row.repeat(after, "F1 I1 W1")
        row.repeat(planned - 2 * num_ranks + rank + 1, "F0 I0 W0 F1 I1 W1")
        row.repeat(after - 1, "I0 W0 F1 I1 W1")
        # The drain: input gradients first, so that the ranks before may go on; weight gradients fill the rest.
        row.repeat(rank, "I0 I1")
        row.repeat(after, "I0 W0")
        row.repeat(rank, "W1 W0")
        columns.append(row.columns())
    return first_microbatches(Schedule("zb_v", vee(num_ranks), planned, tuple(columns)), num_microbatches)
