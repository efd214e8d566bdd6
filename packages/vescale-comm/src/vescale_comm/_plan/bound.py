"""How small a shard can be at best, and why: bounds for any number of tensors, the exact answer for a few.

Every bound holds for each plan in which tensors are contiguous, in whatever order and with whatever gaps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from ..errors import PlanError
from .buffer import TensorSpec

__all__ = ["BLOCK", "BLOCKS", "MULTIPLE", "VOLUME", "exact_shard", "lower_bound", "shard_bound"]

VOLUME, BLOCK, BLOCKS, MULTIPLE = "volume", "block", "blocks", "multiple"
"""What binds: all elements over the ranks, the largest block, blocks that share a rank, or tensors cut twice."""


def lower_bound(specs: Sequence[TensorSpec], world: int, *, multiple: int = 1) -> int:
    """Return a number of elements per rank below which no plan exists.

    Args:
        specs: the tensors of one buffer.
        world: number of ranks, at least 1.
        multiple: the shard must be a multiple of it.

    Returns:
        The largest of four bounds: the elements over the ranks; the largest block; with the blocks sorted by size, the
        sum of the `k + 1` smallest among the `k * world + 1` largest, of which one rank must hold `k + 1`; and the
        smallest multiple of the granularities of all tensors longer than two shards, which are cut twice, so that
        both cuts fall between blocks only if a shard is a multiple of the block.

    Example:
        >>> lower_bound([TensorSpec("w", (7, 10), granularity=20)], world=2)
        40
    """
    return shard_bound([(s.numel, min(s.granularity, s.numel)) for s in specs if s.numel], world, multiple)[0]


def shard_bound(items: Sequence[tuple[int, int]], world: int, multiple: int = 1) -> tuple[int, str]:
    """Return the bound for `(numel, grain)` items and which of the four it is; see `lower_bound`."""
    if not items:
        return 0, VOLUME
    sizes: Counter[int] = Counter()
    for (numel, grain), times in Counter(items).items():
        full, rest = divmod(numel, grain)
        sizes[grain] += full * times
        if rest:
            sizes[rest] += times
    low, kind = -(-sum(size * count for size, count in sizes.items()) // world), VOLUME
    for value, name in ((max(sizes), BLOCK), (_shared(sizes, world), BLOCKS)):
        if value > low:
            low, kind = value, name
    forced = _forced(items, -(-low // multiple) * multiple, multiple)
    return (forced, MULTIPLE) if forced > -(-low // multiple) * multiple else (forced, kind)


def _shared(sizes: Counter[int], world: int) -> int:
    """Bound by blocks that have to share a rank (Martello and Toth's for machines of equal speed)."""
    ends, sums, values = [0], [0], []
    for size in sorted(sizes, reverse=True):
        ends.append(ends[-1] + sizes[size])
        sums.append(sums[-1] + size * sizes[size])
        values.append(size)

    def largest(count: int) -> int:
        run = bisect_left(ends, count)
        return sums[run] - (ends[run] - count) * values[run - 1] if run else 0

    best = 0
    for end in ends[1:]:
        share = (end - 1) // world
        if share:
            best = max(best, largest(share * world + 1) - largest(share * world - share))
    return best


def _forced(items: Sequence[tuple[int, int]], low: int, multiple: int) -> int:
    """Return the first shard from `low` on that is a multiple of every grain that it cuts twice for sure."""
    kinds = set(items)
    while True:
        twice = [(numel, grain) for numel, grain in kinds if numel > 2 * low]
        step = math.lcm(multiple, *(grain for _, grain in twice))
        target = -(-low // step) * step
        if target == low:
            return low
        # A shard in between would do if one of these tensors were no longer cut twice with it.
        low = min([target, *(-(-numel // 2) for numel, _ in twice)])


def exact_shard(specs: Sequence[TensorSpec], world: int, *, multiple: int = 1) -> int:
    """Return the smallest shard that exists, by trying all orders of the tensors.

    For one order, each tensor at its first allowed offset is best: whatever may follow it from a later one may follow
    it from there. Time grows with the factorial of the number of tensors and with their elements.

    Args:
        specs: at most eight tensors that are not empty.
        world: number of ranks, at least 1.
        multiple: the shard must be a multiple of it.

    Raises:
        PlanError: there are more than eight.

    Example:
        >>> exact_shard([TensorSpec("a", (5,), 5), TensorSpec("b", (3,), 3), TensorSpec("c", (4,), 4)], world=2)
        7
    """
    items = sorted((s.numel, min(s.granularity, s.numel)) for s in specs if s.numel)
    if len(items) > 8:
        raise PlanError(f"exact_shard tries all orders: {len(items)} tensors are too many, give at most 8.")
    if not items:
        return 0
    shard = -(-sum(numel for numel, _ in items) // world)
    shard = -(-shard // multiple) * multiple
    while not _fits(items, 0, world, shard):
        shard += multiple
    return shard


def _fits(left: Sequence[tuple[int, int]], at: int, world: int, shard: int) -> bool:
    if not left:
        return True
    if at + sum(numel for numel, _ in left) > world * shard:
        return False
    for index, (numel, grain) in enumerate(left):
        if index and left[index - 1] == left[index]:
            continue
        for offset in range(at, world * shard - numel + 1):
            cuts = range((offset // shard + 1) * shard, offset + numel, shard)
            if all((cut - offset) % grain == 0 for cut in cuts):
                if _fits([*left[:index], *left[index + 1 :]], offset + numel, world, shard):
                    return True
                break
    return False
