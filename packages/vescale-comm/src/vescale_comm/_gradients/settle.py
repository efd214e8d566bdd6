"""Changes of the buckets between two windows: the order that was learned, and parameters that came or went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .bucket import Bucket
from .flags import ORDER, USED, Row
from .lane import BucketOptions, Lane, LaneState, plan_members
from .member import Member
from .rows import used_somewhere

__all__ = ["lanes_in_new_order", "lanes_of_others", "learned_order"]


def learned_order(state: LaneState, arrived: Sequence[Member], options: BucketOptions) -> list[str] | None:
    """Return the order in which backward finished the parameters; None if it gives the buckets that there are.

    Args:
        state: a lane.
        arrived: its members, in the order in which hooks fired.
        options: how buckets are made.
    """
    by_name = {member.name: member for member in state.members}
    seen = dict.fromkeys(member.name for member in arrived if member.name in by_name)
    order = [*seen, *(name for name in state.order if name not in seen)]
    plans = plan_members([by_name[name] for name in order], state.lane.transport.size, options)
    made = [{slot.name for slot in plan.slots} for plan in plans]
    return None if made == [set(bucket.names) for bucket in state.buckets] else order


def lanes_in_new_order(
    lanes: Sequence[LaneState],
    orders: Sequence[Sequence[str] | None],
    rows: Sequence[Sequence[Row]],
    options: BucketOptions,
) -> list[LaneState]:
    """Return lanes with buckets in the orders of their first ranks; all ranks must call it.

    Args:
        lanes: the lanes as they are.
        orders: per lane, the order that this rank learned.
        rows: per lane, what its ranks told.
        options: how buckets are made.
    """
    new = [
        LaneState(state.lane, options, _agreed_order(state, order)) if told[0].state & ORDER else state
        for state, order, told in zip(lanes, orders, rows, strict=True)
    ]
    _carry_over(lanes, new)
    return new


def lanes_of_others(
    lanes: Sequence[LaneState],
    wanted: Sequence[Lane],
    options: BucketOptions,
    weight: float | None,
    total: float | None,
) -> list[LaneState]:
    """Return lanes of other parameters, after those that are new were reduced; all ranks must call it.

    Args:
        lanes: the lanes as they are.
        wanted: as many, with the parameters that they are to have.
        options: how buckets are made.
        weight: factor of this rank's gradients; None: they are not weighted.
        total: the sum of the weights, if sums are divided by it.
    """
    extra = [_reduce_new(state, lane, options, weight, total) for state, lane in zip(lanes, wanted, strict=True)]
    new = [LaneState(lane, options) for lane in wanted]
    _carry_over([*lanes, *extra], new)
    return new


def _agreed_order(state: LaneState, order: Sequence[str] | None) -> list[str]:
    """Return the order of the first rank; all ranks of the lane must call it.

    Args:
        state: the lane.
        order: on the first rank, the order.
    """
    places = torch.zeros(len(state.members), dtype=torch.int64)
    if state.lane.transport.rank == 0 and order is not None:
        index = {member.name: member.index for member in state.members}
        places = torch.tensor([index[name] for name in order], dtype=torch.int64)
    places = places.to(state.device)
    state.lane.transport.broadcast(places, 0).wait()
    return [state.members[place].name for place in places.tolist()]


def _reduce_new(
    state: LaneState, lane: Lane, options: BucketOptions, weight: float | None, total: float | None
) -> LaneState:
    """Reduce what a lane has not, for its parameters came after its buckets; all ranks of the lane must call it.

    Args:
        state: the lane as it was.
        lane: as it will be.
        options: how buckets are made.
        weight: factor of this rank's gradients; None: they are not weighted.
        total: the sum of the weights, if sums are divided by it.

    Returns:
        The lane of those parameters alone, with what it knows of them.
    """
    known = {id(member.param) for member in state.members}
    fresh = [(name, param) for name, param in lane.parameters if id(param) not in known]
    extra = LaneState(replace(lane, parameters=fresh), options)
    if not fresh:
        return extra
    for bucket in extra.buckets:
        bucket.gather(extra.touched, extra.used, USED)
        bucket.launch(bucket.divisor, 1 if weight is None else weight)
    extra.flags.send(Row(0, 0.0, bytes(8), bytes(extra.used)))
    for bucket in extra.buckets:
        bucket.wait()
        if total is not None:
            bucket.divide_by_weights(total)
    used = used_somewhere(extra.flags.receive())
    for bucket in extra.buckets:
        bucket.give(used)
    return extra


def _carry_over(old: Sequence[LaneState], new: Sequence[LaneState]) -> None:
    """Bring to new buckets what the old ones know: sums, held parameters, state of compressors.

    Args:
        old: the lanes as they were.
        new: as they are; those that are the same objects are left alone.
    """
    were: dict[int, tuple[Bucket, Member]] = {
        id(member.param): (bucket, member) for state in old for bucket in state.buckets for member in bucket.members
    }
    kept = {id(state) for state in old}
    memory: dict[str, object] = {}
    for state in old:
        for bucket in state.buckets:
            if bucket.compressor is not None:
                memory.update(bucket.compressor.state_dict())
    for state in new:
        if id(state) in kept:
            continue
        state.written()  # from now on
        for bucket in state.buckets:
            bucket.finished = True  # what counts is that a gradient is the one that was given
            for member in bucket.members:
                if id(member.param) in were:
                    _carry(*were[id(member.param)], member)
            if bucket.compressor is not None:
                bucket.compressor.load_state_dict({n: s for n, s in memory.items() if n in bucket.names})


def _carry(bucket: Bucket, old: Member, new: Member) -> None:
    new.hold = old.hold
    grad = old.param.grad
    if bucket.finished and grad is not None and grad is old.given and new.given is not None:
        new.local(new.given).copy_(old.local(grad))
        new.param.grad = new.given
