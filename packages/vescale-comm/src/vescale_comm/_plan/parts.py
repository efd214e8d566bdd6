"""One group in as few buffers as it takes: `plan_parts` is never worse than the even layout.

Tensors of unlike blocks in one buffer may force its shard to a large common multiple. In buffers by granularity they
do not, at the price of one collective more for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buffer import BufferPlan, TensorSpec
from .packing import Item, pack, pack_within
from .ragged import check_specs, plan_within

__all__ = ["divide", "plan_parts"]


def plan_parts(
    specs: Sequence[TensorSpec], world: int, *, multiple: int = 1, tolerance: float = 0.0
) -> tuple[BufferPlan, ...]:
    """Place the tensors of one group in one buffer if that is as small, and else in several.

    Args:
        specs: the tensors.
        world: number of ranks.
        multiple: each shard is a multiple of so many elements.
        tolerance: how much larger than with one buffer per granularity the sum may be, as a share, to save buffers.

    Returns:
        Plans of buffers that are gathered and reduced together. With tolerance 0 and multiple 1 their shards together
        are at most those of the even layout, in which every tensor is cut by itself.

    Raises:
        PlanError: two tensors have one name, or a number makes no sense.

    Example:
        >>> from vescale_comm._plan import plan_ragged
        >>> specs = [TensorSpec("q", (8, 4), 8), TensorSpec("v", (4, 6), 12)]
        >>> plan_ragged(specs, 2).numel, [plan.numel for plan in plan_parts(specs, 2)]
        (64, [32, 24])
    """
    check_specs(specs, world, multiple)
    filled = [spec for spec in specs if spec.numel]
    items = [(spec.numel, min(spec.granularity, spec.numel)) for spec in filled]
    shards, parts = divide(items, world, multiple, tolerance)
    groups = [[filled[index] for index in part] for part in parts]
    groups[0] += [spec for spec in specs if not spec.numel]
    return tuple(plan_within(g, world, shard, multiple) for g, shard in zip(groups, shards, strict=True))


def divide(
    items: Sequence[Item], world: int, multiple: int = 1, tolerance: float = 0.0
) -> tuple[list[int], list[list[int]]]:
    """Divide `(numel, grain)` items among buffers.

    Returns:
        The shard of each buffer, and the indices of the items in it; one empty buffer where there are no items.
    """
    by_grain: dict[int, list[int]] = {}
    for index, (_, grain) in enumerate(items):
        by_grain.setdefault(grain, []).append(index)
    parts = list(by_grain.values())
    shards = [pack([items[index] for index in part], world, multiple)[0] for part in parts]
    limit = int(sum(shards) * (1 + tolerance))
    one = pack_within(items, world, limit, multiple)
    if one is not None:
        return [one[0]], [list(range(len(items)))]
    while len(parts) > 1:
        best: tuple[int, int, int] | None = None
        slack = limit - sum(shards)
        for a in range(1, len(parts)):
            for b in range(a):
                apart = shards[a] + shards[b]
                joined = [items[index] for index in sorted(parts[a] + parts[b])]
                found = pack_within(joined, world, apart + slack, multiple)
                if found is not None:
                    best, slack = (a, b, found[0]), found[0] - apart - 1
        if best is None:
            break
        a, b, shard = best
        parts[b], shards[b] = sorted(parts[a] + parts[b]), shard
        del parts[a], shards[a]
    return shards, parts
