"""Moves a state from one layout to another, without storage.

A rank that has what it needs copies it; else one of the holders sends it: once per rank that lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _state
from .._coordination import coordinator
from .._state import Packed
from .._trace import span
from .exchange import Exchange, Move
from .layouts import NewLayout, NewLayouts, allocate, choose
from .target import find
from .together import agree_on_layouts, agree_on_loads, buffer_device

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

__all__ = ["reshard"]


def reshard(
    state: Any,
    new_layouts: NewLayouts | Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 1800.0,
) -> Any:
    """Return a state in other layouts, or fill one that is there. All ranks of the group call this and communicate.

    Args:
        state: nested state of tensors; every rank passes the same keys.
        new_layouts: how tensors are to be sharded. A tuple (mesh, placements) for all of them; a mapping from patterns
            of names ("model.*") to such tuples, of which the first that fits counts; a function `(name, tensor)` that
            returns a tuple or None; tensors without one stay as they are. Or another state with the same tensors, which
            are filled in place; its other values stay.
        process_group: the ranks of all meshes, old and new; None: all.
        timeout: seconds to wait for other ranks before data are sent.

    Returns:
        The new state, with detached torch DTensors where a new layout was given, empty on ranks outside of the new
        mesh; other values, and those marked by `local`, as they were. Or the other state, once it is filled.

    Raises:
        StateError: a value that no state can hold.
        LayoutError: a tensor is a pending sum, placements do not fit, or a mesh has ranks outside of the group.
        MismatchError: the other state has other tensors, shapes or dtypes; nothing was moved.
        RanksError: the ranks disagree, or another one failed; nothing was moved.

    Example:
        >>> import torch, vescale_ckpt as ck
        >>> weights, other = {"w": torch.arange(3.0)}, {"w": torch.zeros(3)}
        >>> ck.reshard(weights, other)
        {'w': tensor([0., 1., 2.])}
    """
    session = coordinator(process_group, timeout=timeout).session("reshard")
    match: _state.Match | None = None
    results: list[Tensor] = []
    with session, span("reshard", "reshard"):
        packed = _state.pack(state)
        old = [_state.describe(name, tensor, session.ranks, session.rank) for name, tensor in packed.tensors]
        pairs = choose(_with_all_names(packed), new_layouts)
        if pairs is None:
            moves, match = find(new_layouts, packed, old, session.ranks, session.rank)
        else:
            moves, results = _made(packed, old, pairs, session.ranks, session.rank)
        moves, kind = agree_on_layouts(session, moves)
        exchange = Exchange(moves, session.rank, session.world)
        loads = agree_on_loads(session, exchange.loads())
        exchange.prepare(loads, buffer_device(moves, kind, process_group))
        # From here on ranks wait for each other in collectives, where nobody could be told of a failure.
        session.agree("ready", b"", lambda _: b"")
    exchange.run(process_group)
    if match is not None:
        return match.fill(_no_local)
    return _rebuilt(packed, results, pairs or [])


def _with_all_names(packed: Packed) -> list[tuple[list[str], Tensor]]:
    """Return the tensors with the names of all places where they stand, the first one first."""
    names: list[list[str]] = [[name] for name, _ in packed.tensors]
    for leaf in _state.leaves(packed.tree):
        if leaf.record is not None and leaf.name not in names[leaf.record]:
            names[leaf.record].append(leaf.name)
    return [(known, tensor) for known, (_, tensor) in zip(names, packed.tensors, strict=True)]


def _made(
    packed: Packed,
    old: Sequence[_state.Held],
    pairs: Sequence[NewLayout | None],
    ranks: Sequence[int],
    rank: int,
) -> tuple[list[Move], list[Tensor]]:
    """Return where each tensor goes that gets a new layout, and the tensors of the new state."""
    moves: list[Move] = []
    results: list[Tensor] = []
    for (name, tensor), held, pair in zip(packed.tensors, old, pairs, strict=True):
        if pair is not None:
            tensor = allocate(name, held.spec.shape, _state.dtype_of(held.spec.dtype), pair)
            moves.append(Move(held, _state.describe(name, tensor, ranks, rank)))
        results.append(tensor)
    return moves, results


def _rebuilt(packed: Packed, results: Sequence[Tensor], pairs: Sequence[NewLayout | None]) -> Any:
    root = _state.parse(packed.tree)
    for leaf in _state.leaves_of(root):
        if leaf.kind == "numpy" and pairs[leaf.number] is not None:
            leaf.kind = "tensor"  # an array cannot be sharded
    own = [tensor for _, tensor in packed.local_tensors]

    def local(slot: int) -> Any:
        return _state.local(_state.unpack(packed.local[slot], own.__getitem__, _no_local))

    return _state.build(root, results.__getitem__, local)


def _no_local(slot: int) -> Any:
    raise AssertionError(f"local value {slot} where there is none")
