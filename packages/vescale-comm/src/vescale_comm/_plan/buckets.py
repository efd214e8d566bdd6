"""Buckets: runs of parameters in the order in which backward finishes them, each with a buffer of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from .buffer import BufferPlan, TensorSpec
from .ragged import check_specs, plan_group, plan_ragged

__all__ = ["plan_buckets"]

ALIGNMENT = 64
"""Bytes: a cache line, so that two ranks that share memory do not write into one."""


def plan_buckets(
    specs: Sequence[TensorSpec], world: int, *, bucket_bytes: int, itemsize: int, first_bytes: int | None = None
) -> tuple[BufferPlan, ...]:
    """Cut a sequence of tensors into buckets and plan each.

    A bucket ends before the tensor that would make it larger than the limit; a tensor above the limit is a bucket of
    its own. What remains at the end and is less than an eighth of the limit joins the bucket before it: a collective
    more would cost more than it hides.

    Args:
        specs: in the order of backward, which is that of the buckets.
        world: number of ranks.
        bucket_bytes: limit of a bucket.
        itemsize: bytes of an element.
        first_bytes: limit of the first bucket, smaller so that the first collective starts early; None: as the others.

    Returns:
        One plan per bucket, with shards aligned to 64 bytes. Tensors stand in the given order, except in buckets in
        which some granularity is not 1.

    Raises:
        PlanError: a number makes no sense, or two tensors have one name.

    Example:
        >>> specs = [TensorSpec(name, (100,)) for name in "abcde"]
        >>> [[slot.name for slot in plan.slots] for plan in plan_buckets(specs, 2, bucket_bytes=800, itemsize=4)]
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    if itemsize < 1:
        raise PlanError(f"itemsize is {itemsize}: an element has 1 byte or more.")
    for name, limit in (("bucket_bytes", bucket_bytes), ("first_bytes", first_bytes)):
        if limit is not None and limit < 1:
            raise PlanError(f"{name} is {limit}: a bucket holds 1 byte or more.")
    check_specs(specs, world)
    multiple = max(1, ALIGNMENT // itemsize)
    return tuple(
        plan_ragged(run, world, multiple=multiple)
        if any(spec.granularity > 1 for spec in run)
        else plan_group(run, world, multiple=multiple)
        for run in _runs(specs, bucket_bytes // itemsize, (first_bytes or bucket_bytes) // itemsize)
    )


def _runs(specs: Sequence[TensorSpec], limit: int, first_limit: int) -> list[list[TensorSpec]]:
    runs: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not runs or (filled and filled + spec.numel > (limit if len(runs) > 1 else first_limit)):
            runs.append([])
            filled = 0
        runs[-1].append(spec)
        filled += spec.numel
    if len(runs) > 1 and filled * 8 < limit:
        last = runs.pop()
        runs[-1] += last
    return runs
