"""Moves a state from one layout to another, without storage.

A rank that has what it needs copies it; else one of the holders sends it: once per rank that lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import _state
from .._coordination import coordinator
from .._state import Held
from ..errors import LayoutError, MismatchError, RanksError
from .exchange import Move, exchange, rounds

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["NewLayout", "reshard"]

NewLayout: TypeAlias = "tuple[DeviceMesh, Sequence[Placement]]"
"""A mesh and one placement per axis of it."""


def reshard(
    state: Any,
    new_layouts: NewLayout | Mapping[str, NewLayout] | Callable[[str, Tensor], NewLayout | None] | Any,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 1800.0,
) -> Any:
    """Return a state in other layouts, or fill one that is there. All ranks of the group call this and communicate.

    Args:
        state: nested state of tensors; every rank passes the same keys. Values that are no tensors stay as they are.
        new_layouts: how tensors are to be sharded. A pair (mesh, placements) for all of them; a mapping from patterns
            of names ("model.*") to pairs, of which the first that fits counts; a function `(name, tensor)` that returns
            a pair or None; tensors without a pair stay as they are. Or another state with the same keys, whose tensors
            are filled in place, and which is returned.
        process_group: the ranks of all meshes, old and new; None: all.
        timeout: seconds to wait for other ranks before data are sent.

    Returns:
        The new state, with torch DTensors where a new layout was given; on ranks outside of a new mesh their local
        parts are empty.

    Raises:
        LayoutError: a tensor is a pending sum, or a mesh has ranks outside of the group.
        MismatchError: the states have other keys, shapes or dtypes.
        RanksError: the ranks disagree, or one failed.
    """
    session = coordinator(process_group, timeout=timeout).session("reshard")
    try:
        packed = _state.pack(state)
        old = [_state.describe(name, tensor, session.ranks, session.rank) for name, tensor in packed.tensors]
        pairs = _pairs(packed, new_layouts)
        if pairs is None:
            new = _held_of_target(new_layouts, old, session.ranks, session.rank)
            results = None
        else:
            results = [
                t if pair is None else _allocate(t, pair) for (_, t), pair in zip(packed.tensors, pairs, strict=True)
            ]
            new = [
                None if pair is None else _state.describe(name, result, session.ranks, session.rank)
                for (name, _), result, pair in zip(packed.tensors, results, pairs, strict=True)
            ]
        moves = [Move(a, b) for a, b in zip(old, new, strict=True) if b is not None]
        told = _state.digest([s for move in moves for s in (move.old.spec, move.new.spec)], None, {})
        session.agree("layouts", told, _all_equal)
    except BaseException as error:
        session.fail(error)
        raise
    finally:
        session.close()
    with torch.no_grad():
        for batch in rounds(moves, session.world):
            exchange(batch, session.rank, session.world, process_group, _device(moves, process_group))
    if results is None:
        return new_layouts
    return _state.unpack(packed.tree, results.__getitem__, lambda number: _local_value(packed, number))


def _pairs(packed: _state.Packed, new_layouts: Any) -> list[NewLayout | None] | None:
    """Return the new layout of each tensor, or None if `new_layouts` is a state."""
    if _is_pair(new_layouts):
        return [new_layouts] * len(packed.tensors)
    if isinstance(new_layouts, Mapping) and new_layouts and all(map(_is_pair, new_layouts.values())):
        patterns = list(new_layouts.items())
        return [next((pair for p, pair in patterns if fnmatchcase(name, p)), None) for name, _ in packed.tensors]
    if callable(new_layouts) and not hasattr(new_layouts, "state_dict"):
        pairs = [new_layouts(name, tensor) for name, tensor in packed.tensors]
        for (name, _), pair in zip(packed.tensors, pairs, strict=True):
            if pair is not None and not _is_pair(pair):
                raise LayoutError(
                    f"new_layouts: for {name} it returned {pair!r}, not a pair (mesh, placements) or None."
                )
        return pairs
    return None


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], DeviceMesh)


def _held_of_target(target: Any, old: Sequence[Held], ranks: Sequence[int], rank: int) -> list[Held | None]:
    into = dict(_state.pack(target).tensors)
    wrong = sorted(set(into) ^ {held.spec.name for held in old})
    new: list[Held | None] = []
    for held in [] if wrong else old:
        name, spec = held.spec.name, held.spec
        there = _state.describe(name, into[name], ranks, rank)
        new.append(there)
        if (there.spec.shape, there.spec.dtype) != (spec.shape, spec.dtype):
            wrong.append(f"{name}: {spec.dtype} {spec.shape} to {there.spec.dtype} {there.spec.shape}")
    if wrong:
        raise MismatchError(f"new_layouts: not the same tensors as the state: {'; '.join(wrong[:10])}.")
    return new


def _allocate(tensor: Tensor, pair: NewLayout) -> DTensor:
    mesh, placements = pair
    shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    if any(placement.is_partial() for placement in placements):
        raise LayoutError(f"new_layouts: {tuple(placements)} asks for a pending sum, which no tensor can be moved to.")
    size = compute_local_shape_and_global_offset(shape, mesh, placements)[0] if mesh.get_coordinate() else (0,)
    local = torch.empty(size, dtype=tensor.dtype, device=mesh.device_type)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _device(moves: Sequence[Move], group: dist.ProcessGroup | None) -> torch.device:
    """Return where buffers must be: the device that the group's backend takes and the tensors are on."""
    for move in moves:
        for _, view in (*move.old.parts, *move.new.parts):
            if view.device.type != "cpu":
                return view.device
    backend = dist.get_backend(group) if dist.is_initialized() else "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _all_equal(messages: list[bytes]) -> bytes:
    other = next((rank for rank, message in enumerate(messages) if message != messages[0]), None)
    if other is not None:
        raise RanksError(
            f"reshard: ranks 0 and {other} have other keys, shapes or layouts. Pass the same on all ranks."
        )
    return b""


def _local_value(packed: _state.Packed, number: int) -> Any:
    tensors = [tensor for _, tensor in packed.local_tensors]
    return _state.unpack(packed.local[number], tensors.__getitem__, lambda _: None)
