"""The order in which gloo adds, as torch uses it: a ring, in which every rank ends up with one run of elements.

Run c starts at rank c-1 and travels to c-2, c-3, ... until it is complete at rank c; each hop computes its own
numbers plus the received ones in the dtype of the buffer, so bf16 is rounded at every hop. Where the runs are cut
depends on bytes and world, hence so do the bits. Sources: gloo/allreduce.cc (`ring`), gloo/reduce.cc, and
ProcessGroupGloo.cpp of torch (reduce_scatter is an all_reduce of a clone); compared bit for bit in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .orders import Order, Segment, chain, divide_up, round_up

__all__ = ["GlooOrder"]

SEGMENT_BYTES = 1 << 20
CARRIED = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)


@dataclass(frozen=True, slots=True)
class GlooOrder(Order):
    """Ring of gloo.

    Example:
        >>> for part in GlooOrder().segments("all_reduce", 5, 4, 2):
        ...     print(part.start, part.stop, "ends at rank", part.root.rank)
        0 4 ends at rank 0
        4 5 ends at rank 1
    """

    name = "gloo"
    backend = "gloo"
    verified = True
    joins_coalesced = True
    scatters_lists_one_by_one = True
    leaves_partial_sums = True

    def segments(self, collective: str, numel: int, itemsize: int, world: int, root: int = 0) -> tuple[Segment, ...]:
        """Return one segment per rank, as far as there are elements; see `Order.segments`."""
        if world == 1:
            return (Segment(0, numel, chain([0])),)
        cut = _reduce_run if collective == "reduce" else _all_reduce_run
        run = cut(numel * itemsize, itemsize, world) // itemsize if numel else 0
        found = []
        for owner in range(world):
            start, stop = min(owner * run, numel), min((owner + 1) * run, numel)
            if start < stop:
                ranks = [(owner - 1 - hop) % world for hop in range(world)]
                found.append(Segment(start, stop, chain(ranks)))
        return tuple(found)

    def carries(self, dtype: torch.dtype) -> bool:
        """Tell whether gloo's collectives take this dtype; sends and receives take any."""
        return dtype in CARRIED


def _all_reduce_run(total: int, itemsize: int, world: int) -> int:
    """Return the bytes that each rank owns: equally many pieces per rank, at least two, none above the limit."""
    limit = itemsize * max(1, SEGMENT_BYTES // itemsize)
    pieces = round_up(max(divide_up(total, limit), 2 * world), world)
    return pieces // world * round_up(divide_up(total, pieces), itemsize)


def _reduce_run(total: int, itemsize: int, world: int) -> int:
    """Return the bytes that each rank owns in a reduce to one rank, where the size of pieces comes first."""
    limit = itemsize * max(1, SEGMENT_BYTES // itemsize)
    piece = round_up(min(divide_up(total, 2 * world), limit), itemsize)
    pieces = round_up(max(divide_up(total, piece), 2 * world), world)
    return pieces // world * piece
