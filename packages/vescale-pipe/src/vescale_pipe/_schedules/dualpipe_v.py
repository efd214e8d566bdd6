"""DualPipeV: half of DualPipe on a V placement, where forwards and backwards of two micro-batches overlap."""

from __future__ import annotations

from .._schedule import Schedule
from ._columns import Row, first_microbatches, vee

__all__ = ["dualpipe_v"]


def dualpipe_v(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages a rank; in the steady phase each forward is joined with a backward of the other chunk.

    With costs of one chunk and F&B for a joined pair, the ranks that idle longest do so for (P-1)(F&B + B - 3W), if
    M >= 2P and F, W <= I. Live activations: at most 2P + 1 chunks. With fewer micro-batches it is the schedule for
    2P without the others. Gradients accumulate in the order of the micro-batches. Source: DeepSeek-AI, "DeepSeek-V3
    Technical Report" (2024), and DualPipeV, its "cut in half" form (Sea AI Lab, 2025).

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: 2, no other number.
    """
    planned = max(num_microbatches, 2 * num_ranks)
    columns = []
    for rank in range(num_ranks):
        after = num_ranks - 1 - rank
        row = Row([rank, 2 * num_ranks - 1 - rank])
        row.repeat(2 * after, "F0")
        row.repeat(rank + 1, "F0 F1")
        # The first micro-batches come back: nothing is left to overlap with, weight gradients fill the gaps.
        row.repeat(after, "I1 W1 F1")
        row.repeat(planned - 2 * num_ranks + rank + 1, "F0+B1 F1+B0")
        row.repeat(after, "B1 F1+B0")
        # The drain: in its second half weight gradients wait, so that input gradients reach the first rank early.
        row.repeat((rank + 1) // 2, "B1 B0")
        row.repeat(1 - rank % 2, "B1 I0")
        row.repeat((rank + 1) // 2, "I1 I0")
        waiting = "0" * (1 - rank % 2) + "10" * ((rank + 1) // 2) + "0" * after
        row.repeat(1, " ".join(f"W{chunk} I0" for chunk in waiting[:after]))
        row.repeat(1, " ".join(f"W{chunk}" for chunk in waiting[after:]))
        columns.append(row.columns())
    return first_microbatches(Schedule("dualpipe_v", vee(num_ranks), planned, tuple(columns)), num_microbatches)
