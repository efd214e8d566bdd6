"""A state that is filled in place: which of its tensors takes the values of which other one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from .. import _state
from .._state import Held, Match, Packed
from ..errors import MismatchError
from .exchange import Move

__all__ = ["find"]


def find(target: Any, packed: Packed, old: Sequence[Held], ranks: Sequence[int], rank: int) -> tuple[list[Move], Match]:
    """Return where each tensor goes, and what hands the filled tensors to the objects of the target.

    Args:
        target: the state that is filled.
        packed: the state that has the values.
        old: its tensors.
        ranks: global rank of each member.
        rank: number of this member.

    Raises:
        MismatchError: the two do not have the same tensors; lists all that differs.
    """
    theirs = _state.template(target)
    row = theirs.row.number
    names = {theirs.leaf_names[number] for number in row}
    names |= {leaf.name for leaf in _state.leaves(packed.tree) if leaf.record is not None}
    match = _state.match(theirs, packed.tree, [held.spec for held in old], wanted=names.__contains__)
    match.keep_locals()
    problems = [kind.replace("in the checkpoint", "in the state", 1) for kind in match.kinds]
    problems += [f"{name}: only in new_layouts" for name in match.missing if name in names]
    problems += [f"{name}: only in the state" for name in match.unexpected if name in names]
    problems += [f"{one}, {other}: two tensors in the state, one in new_layouts" for one, other in match.shared]
    moves = []
    for goal in match.targets:
        if goal.tensor is None:
            problems.append(f"{goal.name}: only in the state")
            continue
        held = old[goal.record]
        new = _state.describe(goal.name, goal.tensor, ranks, rank)
        before, after = ((list(h.spec.shape), h.spec.dtype) for h in (held, new))
        if before != after:
            problems.append(f"{goal.name}: {before[1]} {before[0]} in the state, {after[1]} {after[0]} in new_layouts")
        if any(_state.shares_elements(view) for _, view in new.parts):
            problems.append(f"{goal.name}: a tensor of which elements share memory, as expand() makes it")
        moves.append(Move(held, new))
    # What a place of another kind, or one without a name, has taken notice of without filling anything.
    told = {problem.partition(":")[0] for problem in problems}
    moved = {goal.record for goal in match.targets}
    held_at = {leaf.name: leaf.record for leaf in _state.leaves(packed.tree) if leaf.record is not None}
    problems += [f"{name}: only in the state" for name, at in held_at.items() if at not in moved and name not in told]
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise MismatchError(
            f"new_layouts: {_what(target, bool(row))}; nothing was moved.\n  " + "\n  ".join(problems[:20] + more)
        )
    _check_apart(moves)
    return moves, match


def _what(target: Any, has_tensors: bool) -> str:
    if has_tensors:
        return "it does not have the same tensors as the state"
    return (
        f"expected a tuple (mesh, placements), a mapping from patterns to such tuples, a function, or a state with the "
        f"tensors of `state`, but got {target!r:.100}, in which there is no tensor"
    )


def _check_apart(moves: Iterable[Move]) -> None:
    """Raise MismatchError if a tensor would be overwritten before it is read."""
    spans = []
    for move in moves:
        same = {(box, *_place(view)) for box, view in move.old.parts}
        parts = [(False, view, move.old) for _, view in move.old.parts]
        parts += [(True, view, move.new) for box, view in move.new.parts if (box, *_place(view)) not in same]
        spans += [(*_span(view), written, held.spec.name) for written, view, held in parts]
    ends: dict[bool, tuple[Any, int, str]] = {}  # per kind: device, and the end that is furthest so far
    for device, start, stop, written, name in sorted(spans):
        other = ends.get(not written)
        if other is not None and other[0] == device and other[1] > start:
            one, two = (name, other[2]) if written else (other[2], name)
            raise MismatchError(
                f"new_layouts: {one} shares memory with {two} of the state, which would be overwritten before it is "
                f"read. Fill tensors with memory of their own, or pass layouts."
            )
        if written not in ends or ends[written][0] != device or ends[written][1] < stop:
            ends[written] = (device, stop, name)


def _place(view: Tensor) -> tuple[Any, ...]:
    return view.device, view.data_ptr(), view.stride()


def _span(view: Tensor) -> tuple[str, int, int]:
    extent = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return str(view.device), view.data_ptr(), view.data_ptr() + extent * view.element_size()
