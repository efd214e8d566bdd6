"""Plans of one buffer: `plan_group` keeps order and cares for no blocks, `plan_ragged` tears none and pads least."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from .bound import BLOCK, BLOCKS, VOLUME, shard_bound
from .buffer import BufferPlan, Slot, TensorSpec
from .packing import pack, pack_within

__all__ = ["check_specs", "plan_group", "plan_ragged", "plan_within"]


def plan_group(specs: Sequence[TensorSpec], world: int, *, multiple: int = 1) -> BufferPlan:
    """Put tensors one behind the other in the given order, cut anywhere.

    Args:
        specs: the tensors, of granularity 1.
        world: number of ranks.
        multiple: the shard is rounded up to a multiple of so many elements, such as for alignment.

    Returns:
        A plan without gaps; what is padded stands at the end.

    Raises:
        PlanError: two tensors have one name, a tensor has blocks, or a number makes no sense.

    Example:
        >>> plan = plan_group([TensorSpec("w", (3, 3)), TensorSpec("b", (3,))], world=2, multiple=4)
        >>> plan.shard, [slot.offset for slot in plan.slots]
        (8, [0, 9])
    """
    check_specs(specs, world, multiple)
    slots, at = [], 0
    for spec in specs:
        if spec.granularity > 1:
            raise PlanError(
                f"{spec.name} has blocks of {spec.granularity} elements, which plan_group would tear: use plan_ragged."
            )
        slots.append(Slot(spec.name, spec.shape, at))
        at += spec.numel
    shard = -(-at // (world * multiple)) * multiple
    return BufferPlan(tuple(slots), world, shard, f"{at} elements over {world} ranks, in multiples of {multiple}")


def plan_ragged(specs: Sequence[TensorSpec], world: int, *, multiple: int = 1) -> BufferPlan:
    """Place the tensors of one group so that no block is torn and shards are as small as the search can make them.

    Each tensor is contiguous, so the gathered buffer holds it ready for use. The order is the given one where that
    costs nothing. A tensor cut more than once forces the shard to a multiple of its block; where tensors of unlike
    blocks force too large a multiple, `plan_parts` uses several buffers and is never worse than the even layout.

    Args:
        specs: the tensors; a granularity above the number of elements keeps the tensor whole.
        world: number of ranks.
        multiple: the shard is a multiple of so many elements, such as for alignment.

    Returns:
        A plan whose `reason` tells what keeps the shard from being smaller.

    Raises:
        PlanError: two tensors have one name, or a number makes no sense.

    Example:
        >>> plan = plan_ragged([TensorSpec("w", (6, 4), granularity=8), TensorSpec("b", (8,))], world=2)
        >>> plan.shard, [(slot.name, slot.offset) for slot in plan.slots], plan.padding
        (16, [('w', 0), ('b', 24)], 0.0)
    """
    check_specs(specs, world, multiple)
    return plan_within(specs, world, None, multiple)


def plan_within(specs: Sequence[TensorSpec], world: int, limit: int | None, multiple: int = 1) -> BufferPlan:
    """Do as `plan_ragged` does for specs that are checked, with a shard of at most `limit`, which is known to exist."""
    filled = [spec for spec in specs if spec.numel]
    items = [(spec.numel, min(spec.granularity, spec.numel)) for spec in filled]
    found = pack(items, world, multiple) if limit is None else pack_within(items, world, limit, multiple)
    assert found is not None, "a shard of this size exists"
    shard, offsets = found
    slots = [Slot(s.name, s.shape, at, s.granularity) for s, at in zip(filled, offsets, strict=True)]
    slots += [Slot(spec.name, spec.shape, 0, spec.granularity) for spec in specs if not spec.numel]
    slots.sort(key=lambda slot: (slot.offset, slot.stop))
    return BufferPlan(tuple(slots), world, shard, _reason(filled, items, world, shard, multiple))


def _reason(
    specs: Sequence[TensorSpec], items: Sequence[tuple[int, int]], world: int, shard: int, multiple: int
) -> str:
    if not specs:
        return "nothing to place"
    low, kind = shard_bound(items, world, multiple)
    largest = max(range(len(items)), key=lambda i: items[i][1])
    name, grain = specs[largest].name, items[largest][1]
    if kind == VOLUME:
        text = f"{sum(numel for numel, _ in items)} elements over {world} ranks"
    elif kind == BLOCK:
        text = f"one block of {name}: {grain} elements"
    elif kind == BLOCKS:
        count = sum(-(-numel // block) for numel, block in items)
        text = f"{count} blocks over {world} ranks, of up to {grain} elements ({name})"
    else:
        volume = -(-sum(numel for numel, _ in items) // world)
        cut = {grain: spec.name for spec, (numel, grain) in zip(specs, items, strict=True) if numel > 2 * volume}
        blocks = ", ".join(f"{grain} ({name})" for grain, name in sorted(cut.items()))
        text = f"tensors over three or more ranks: a multiple of their blocks {blocks}"
    if multiple > 1:
        text += f", in multiples of {multiple}"
    return text if shard == low else f"the search; no plan is below {low}: {text}"


def check_specs(specs: Sequence[TensorSpec], world: int, multiple: int = 1) -> None:
    """Refuse what cannot be planned.

    Raises:
        PlanError: two tensors have one name, or a number makes no sense.
    """
    if world < 1:
        raise PlanError(f"world is {world}: a buffer is shared by at least one rank.")
    if multiple < 1:
        raise PlanError(f"multiple is {multiple}: give 1 or more elements.")
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise PlanError(f"Two tensors are called {spec.name}: give each parameter once.")
        names.add(spec.name)
        if spec.granularity < 1 or any(size < 0 for size in spec.shape):
            raise PlanError(
                f"{spec.name} has shape {spec.shape} and granularity {spec.granularity}: sizes are 0 or more, "
                f"the granularity 1 or more."
            )
