"""Replicated tensors are read once: each holder reads a stretch of their bytes and sends it to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _state
from .._coordination import Coordinator
from .._geometry import Assignment, Geometry, Piece, Rule
from .._state import Held, Target
from .target import Request

__all__ = ["Share", "exchange", "shares"]

ROUND_BYTES = 64 << 20
FEW = 2
"""Up to this many replicas each reads for itself: sending would take longer."""
Targets = Sequence[tuple[Target, Held]]


@dataclass(slots=True)
class Share:
    """Tensors that the same ranks hold, all of them the same."""

    holders: tuple[int, ...]
    """Members of the group, in the order that all agree on."""
    group: Any
    """Process group of these ranks."""
    numbers: list[int]
    """Which targets."""

    @property
    def key(self) -> str:
        """Return what names the set of ranks."""
        return hashlib.sha256(repr(list(self.holders)).encode()).hexdigest()[:16]

    def digest(self, held: Targets) -> str:
        """Return what is equal on all holders if they are to send each other the same tensors."""
        hashed = hashlib.sha256()
        for number in self.numbers:
            target, own = held[number]
            boxes = [(box.offset, box.shape) for box, _ in own.parts]
            hashed.update(repr((target.name, target.record, own.spec.dtype, own.spec.shape, boxes)).encode())
        return hashed.hexdigest()[:32]

    def pieces(self, held: Targets) -> dict[int, list[tuple[int, Piece]]]:
        """Return per holder what it reads, as (number of the target, piece)."""
        geometry = [
            Geometry(spec.shape, _state.itemsize(spec.dtype), spec.layout)
            for spec in (held[number][1].spec for number in self.numbers)
        ]
        assignment = Assignment(geometry)
        return {rank: [(self.numbers[at], piece) for at, piece in assignment.pieces(rank)] for rank in self.holders}

    def requests(self, held: Targets, rank: int) -> list[Request]:
        """Return what this rank reads for all holders."""
        found = []
        for number, piece in self.pieces(held)[rank]:
            target, own = held[number]
            for box in piece.boxes():
                for mine, view in own.parts:
                    common = mine.intersect(box)
                    if common is not None:
                        found.append(Request(target.record, common, view[common.slices(mine)]))
        return found


def shares(held: Targets, session: Coordinator, broadcast: bool | str, group: Any) -> list[Share]:
    """Find the tensors that are read once and sent; the same on all of their holders.

    Args:
        held: what this rank fills.
        session: the ranks that load.
        broadcast: True, False, or "auto" for where it pays.
        group: process group of the ranks that load; None: all.
    """
    if session.world == 1 or broadcast is False or not dist.is_initialized():
        return []
    found: dict[tuple[int, ...], Share] = {}
    for number, (target, own) in enumerate(held):
        layout = own.spec.layout
        if not isinstance(layout, Rule) or not own.parts:
            continue
        holders = layout.holders(own.spec.shape, session.rank)
        if len(holders) <= (FEW if broadcast == "auto" else 1):
            continue
        if holders not in found:
            of_holders = _group_of(holders, target.tensor, layout, session, group)
            if of_holders is None:
                continue
            found[holders] = Share(holders, of_holders, [])
        found[holders].numbers.append(number)
    return list(found.values())


def _group_of(holders: tuple[int, ...], tensor: Any, layout: Rule, session: Coordinator, group: Any) -> Any:
    """Return a process group of exactly these ranks, if there is one already."""
    if len(holders) == session.world:
        return group if group is not None else dist.group.WORLD
    axes = [a for a, text in enumerate(layout.placements) if text == "R" and layout.mesh.shape[a] > 1]
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or len(axes) != 1 or tuple(mesh.shape) != tuple(layout.mesh.shape):
        return None
    return mesh.get_group(axes[0])


def exchange(parts: Sequence[Share], held: Targets, session: Coordinator) -> None:
    """Send what this rank has read to the other holders, and take what they have read."""
    with torch.no_grad():
        for part in parts:
            for owner, pieces in part.pieces(held).items():
                for batch in _batches(pieces, held):
                    _send(batch, owner, part, held, session)


def _batches(pieces: Sequence[tuple[int, Piece]], held: Targets) -> list[list[tuple[int, Piece]]]:
    """Cut the pieces of one holder into rounds, so that buffers stay small."""
    batches: list[list[tuple[int, Piece]]] = []
    room = 0
    for number, piece in pieces:
        itemsize = _state.itemsize(held[number][1].spec.dtype)
        most = ROUND_BYTES // itemsize
        for start in range(piece.start, piece.stop, most):
            part = Piece(piece.box, start, min(piece.stop, start + most))
            if not batches or part.numel * itemsize > room:
                batches.append([])
                room = ROUND_BYTES
            batches[-1].append((number, part))
            room -= part.numel * itemsize
    return batches


def _send(batch: Sequence[tuple[int, Piece]], owner: int, part: Share, held: Targets, session: Coordinator) -> None:
    blocks = [block for number, piece in batch for block in _blocks(piece, held[number][1])]
    sizes = [-(-block.nbytes // 16) * 16 for block in blocks]
    device = blocks[0].device if dist.get_backend(part.group) == "nccl" else torch.device("cpu")
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    at = 0
    if session.rank == owner:
        for block, size in zip(blocks, sizes, strict=True):
            _as(buffer[at : at + block.nbytes], block).copy_(block)
            at += size
    dist.broadcast(buffer, src=session.ranks[owner], group=part.group)
    if session.rank != owner:
        for block, size in zip(blocks, sizes, strict=True):
            block.copy_(_as(buffer[at : at + block.nbytes], block))
            at += size


def _blocks(piece: Piece, own: Held) -> list[Tensor]:
    """Return views of this rank's memory that hold the elements of a piece, in its order."""
    found = []
    for box in piece.boxes():
        for mine, view in own.parts:
            common = mine.intersect(box)
            if common is not None:
                found.append(view[common.slices(mine)])
    return found


def _as(data: Tensor, like: Tensor) -> Tensor:
    return data.view(like.dtype).view(like.shape)
