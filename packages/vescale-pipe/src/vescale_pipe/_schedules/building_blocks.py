"""V-Half and V-Min: a building block repeated for each micro-batch, whose lifespans decide the memory.

On a V placement the two stages of a rank share its memory: what one keeps long the other keeps short, so that all ranks
need the same, and less than 1F1B's first rank does.
"""

from __future__ import annotations

import torch

from .._schedule import Schedule
from ._columns import vee
from ._filling import fill

__all__ = ["v_half", "v_min"]

PERIOD = 6
"""Actions of one micro-batch on one rank: F, I and W of two stages."""


def v_half(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages a rank, at half the memory of 1F1B.

    Live activations: at most P // 2 + 1 of one rank's layers. With costs of one chunk and F = I = W = 1, idle per
    rank: 3P - 4 if M >= P > 2; 1F1B's is 6(P-1). Gradients accumulate in the order of the micro-batches. Source: Qi
    et al., "Pipeline Parallelism with Controllable Memory" (2024); offsets and filling are ours.

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: 2, no other number.
    """
    block = _block(num_ranks, (2, 1, 2, 1), (0, 0, 1 if num_ranks % 2 else 4))
    return _repeat("v_half", num_ranks, num_microbatches, block, 2 * (num_ranks // 2) + 2)


def v_min(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Two stages a rank, at a third of the memory of 1F1B, the least that keeps ranks busy in the steady phase.

    Live activations: at most (P + 1) // 3 + 1 of one rank's layers. With costs of one chunk and F = I = W = 1, idle
    per rank: 4P - 5, or 4P - 3 if P is a multiple of 3, if M >= P > 1; 1F1B's is 6(P-1). Gradients accumulate in the
    order of the micro-batches. Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024); offsets and
    filling are ours.

    Args:
        num_ranks: P.
        num_microbatches: M.
        chunks: 2, no other number.
    """
    block = _block(num_ranks, (1, 1, 1, 1), (0, 0 if num_ranks % 3 else 2, 0))
    return _repeat("v_min", num_ranks, num_microbatches, block, 2 * ((num_ranks + 1) // 3) + 2)


def _block(num_ranks: int, slopes: tuple[int, int, int, int], gaps: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """Return when each rank starts F0, F1, I1 and I0 of the first micro-batch.

    Blocks that follow each other by `PERIOD` do not collide if the four times of a rank differ modulo it; the slopes
    and gaps above are such.

    Args:
        num_ranks: P.
        slopes: time from one rank to the next on each of the four legs.
        gaps: time between the end of one leg and the start of the next.
    """
    last = num_ranks - 1
    down = [slopes[0] * rank for rank in range(num_ranks)]
    up = [down[last] + 1 + gaps[0] + slopes[1] * (last - rank) for rank in range(num_ranks)]
    back = [up[0] + 1 + gaps[1] + slopes[2] * rank for rank in range(num_ranks)]
    home = [back[last] + 1 + gaps[2] + slopes[3] * (last - rank) for rank in range(num_ranks)]
    return list(zip(down, up, back, home, strict=True))


def _repeat(name: str, num_ranks: int, num_microbatches: int, block: list[tuple[int, ...]], cap: int) -> Schedule:
    """Repeat a block for each micro-batch, and put the weight gradients where ranks would idle or memory runs out."""
    starts = torch.tensor(block).unsqueeze(1) + PERIOD * torch.arange(num_microbatches).unsqueeze(1)
    columns = fill(starts.flatten(1), cap)
    if columns is None:
        raise AssertionError(f"{name}: no order of {num_ranks} ranks fits {cap} activations")
    return Schedule(name, vee(num_ranks), num_microbatches, columns)
