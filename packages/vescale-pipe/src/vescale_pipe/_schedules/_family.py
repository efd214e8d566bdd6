"""The family of schedules whose ranks run some forwards in advance, and then one backward and one forward in turn.

Its parameters are the chunks of a rank, how many forwards run in advance, and whether and how long weight
gradients wait.
"""

from __future__ import annotations

import torch

from .._schedule import Schedule
from ._columns import Slots, interleave

__all__ = ["family"]


def family(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    slope: float,
    delay: float | None = None,
    extra: int = 0,
) -> Schedule:
    """Write a member of the family.

    With one chunk, (slope, delay) = (1, None) is 1F1B, (2, None) its eager form, (1, 1) ZB-H1, (2, 2) ZB-H2. With more,
    (2, None) is interleaved 1F1B, and (1, 1) the interleaved ZB-H1. Fractions are for those who search.

    Args:
        name: of the schedule.
        num_ranks: P.
        num_microbatches: M.
        chunks: v, stages a rank.
        slope: forwards in advance per rank that follows, beyond the first v - 1 chunks of a round.
        delay: input gradients that run on rank r between an input gradient and its weight gradient: round(delay * r).
            None: whole backwards.
        extra: forwards in advance of every rank.
    """
    forward, backward, largest = _rounds(num_ranks, num_microbatches, chunks)
    rank = torch.arange(num_ranks)
    ahead = _rounded((num_ranks - 1 - rank) * slope) + (chunks - 1) * largest + 1 + extra
    waits = None if delay is None else _rounded(rank * delay)
    return interleave(name, num_ranks, num_microbatches, forward, backward, ahead, waits)


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.round().to(torch.int64)


def _rounds(num_ranks: int, num_microbatches: int, chunks: int) -> tuple[Slots, Slots, int]:
    """Return the order of forwards, that of backwards, and the micro-batches of the largest round.

    In a round all its micro-batches go through one chunk before they go through the next one.

    Args:
        num_ranks: P; a round has at least that many micro-batches, if there are so many.
        num_microbatches: M.
        chunks: v, stages a rank.
    """
    sizes = [
        part.numel() for part in torch.arange(num_microbatches).tensor_split(max(1, num_microbatches // num_ranks))
    ]
    chunk, microbatch = [], []
    first = 0
    for size in sizes:
        chunk.append(torch.arange(chunks).repeat_interleave(size))
        microbatch.append(torch.arange(first, first + size).repeat(chunks))
        first += size
    forward = Slots(torch.cat(chunk), torch.cat(microbatch))
    return forward, Slots(chunks - 1 - forward.chunk, forward.microbatch), sizes[0]
