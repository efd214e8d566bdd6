"""What is read from the rows that ranks exchange at the end of a window, and the errors that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import CommError, MismatchError, NotFiniteError
from .agree import check_same
from .bucket import Bucket
from .flags import BAD, CHANGED, FAILED, LATE, ORDER, USED, WEIGHTED, Row
from .lane import LaneState

__all__ = ["judge", "late_buckets", "mark_bad", "refuse_lost", "row_of", "used_somewhere"]


def mark_bad(bucket: Bucket, used: bytearray) -> None:
    """Mark the parameters of a bucket whose gradients on this rank are not finite.

    Args:
        bucket: with gradients in its buffer.
        used: gets the marks.
    """
    if bool(torch.isfinite(bucket.buffer.sum())):
        return
    for member in bucket.members:
        if not bool(torch.isfinite(member.view).all()):
            used[member.index] |= BAD


def used_somewhere(rows: Sequence[Row]) -> Sequence[int] | None:
    """Return per parameter whether some rank had a gradient; None: all had."""
    parameters = {row.parameters for row in rows}
    if len(parameters) == 1:
        only = next(iter(parameters))
        if all(only):
            return None
        return only
    return [any(flag & (USED | LATE) for flag in column) for column in zip(*parameters, strict=True)]


def row_of(state: LaneState, digest: bytes, weight: float | None, *, failed: bool, ordered: bool) -> Row:
    """Return what this rank tells the others at the end of a window.

    Args:
        state: the lane.
        digest: of its parameters.
        weight: factor of this rank's gradients; None: they are not weighted.
        failed: whether its backward did not end.
        ordered: whether it knows a better order of the parameters.
    """
    told = FAILED * failed | WEIGHTED * (weight is not None) | ORDER * ordered | CHANGED * state.written()
    return Row(told, 0.0 if weight is None else weight, digest, bytes(state.used))


def late_buckets(lanes: Sequence[LaneState], rows: Sequence[Sequence[Row]]) -> list[tuple[LaneState, Bucket]]:
    """Return the buckets to which some rank added after their launch, and have them wait for the end from now on.

    Args:
        lanes: the lanes.
        rows: per lane, those of all its ranks.
    """
    return [(state, bucket) for state, told in zip(lanes, rows, strict=True) for bucket in _late(state, told)]


def _late(state: LaneState, rows: Sequence[Row]) -> list[Bucket]:
    found = []
    late = {index for flags in {row.parameters for row in rows} for index, flag in enumerate(flags) if flag & LATE}
    for bucket in state.buckets if late else ():
        members = [member for member in bucket.members if member.index in late]
        for member in members:
            member.hold = True
        if members:
            found.append(bucket)
    return found


def judge(state: LaneState, rows: Sequence[Row], lines: Callable[[], Sequence[str]]) -> None:
    """Check what the ranks of a lane told.

    Args:
        state: the lane.
        rows: of all its ranks.
        lines: makes what the ranks should agree on.

    Raises:
        MismatchError: a rank failed, or does something else than others.
        NotFiniteError: a gradient is not finite.
    """
    if (
        all(row is rows[0] for row in rows)
        and not rows[0].state & FAILED
        and not any(flag & BAD for flag in rows[0].parameters)
    ):
        return
    failed = [rank for rank, row in enumerate(rows) if row.state & FAILED]
    if failed:
        raise MismatchError(
            f"The backward of {_ranks(failed)} raised an error, after reductions had begun. This step's gradients "
            "are dropped on all ranks; all may go on with the next one, after zero_grad()."
        )
    changed = [bool(row.state & CHANGED) for row in rows]
    if len(set(changed)) > 1:
        raise MismatchError(
            f"Since the last reduction parameters were updated on {_ranks([r for r, c in enumerate(changed) if c])}, "
            f"but not on {_ranks([r for r, c in enumerate(changed) if not c])}, so that ranks hold other values now. "
            "Call optimizer.step() on all ranks or on none. This step's gradients are dropped on all ranks."
        )
    weighted = [bool(row.state & WEIGHTED) for row in rows]
    if len(set(weighted)) > 1:
        raise MismatchError(
            f"Gradients are weighted on {_ranks([r for r, w in enumerate(weighted) if w])}, but not on "
            f"{_ranks([r for r, w in enumerate(weighted) if not w])}. Give a weight on all ranks, or on none."
        )
    if len({row.digest for row in rows}) > 1:
        check_same(
            state.lane.transport,
            state.device,
            lines(),
            "the parameters that are trainable now",
            "Add, remove, freeze and unfreeze parameters on all ranks before the same forward.",
        )
    bad = [
        f"{member.name} on rank {rank}"
        for member in state.members
        for rank, row in enumerate(rows)
        if row.parameters[member.index] & BAD
    ]
    if bad:
        more = f", and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise NotFiniteError(
            f"Gradients are not finite, before they were summed: {', '.join(bad[:5])}{more}. This step's gradients "
            "are dropped on all ranks."
        )


def refuse_lost(cause: str) -> None:
    """Refuse to go on after a reduction of which this rank has not got the results.

    Args:
        cause: what interrupted it here; empty: nothing did.

    Raises:
        CommError: something did.
    """
    if cause:
        raise CommError(
            f"A reduction of gradients was interrupted here by {cause}, and is lost, while other ranks may have gone "
            "on with it: parameters may differ now. Load a checkpoint on all ranks, and make anew what reduces the "
            "gradients."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
