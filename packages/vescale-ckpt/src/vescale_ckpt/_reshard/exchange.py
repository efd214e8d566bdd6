"""Sends the blocks of many tensors in one uneven all-to-all, through one buffer of bytes per direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .._geometry import Box
from .._state import Held, itemsize
from .routes import Route, routes

__all__ = ["Move", "exchange", "rounds"]

ROUND_BYTES = 64 << 20
"""All ranks together move about this much per rank at a time, so that buffers stay small."""


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor."""

    old: Held
    """Where its values are."""
    new: Held
    """Where they have to go."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.old.spec.dtype)


def rounds(moves: Sequence[Move], world: int) -> list[list[tuple[Move, list[Route]]]]:
    """Return the routes of all tensors, in groups that are exchanged together; the same on all ranks."""
    found: list[list[tuple[Move, list[Route]]]] = []
    room = 0
    for move in moves:
        spec = move.old.spec
        ways = list(routes(spec.shape, spec.layout, move.new.spec.layout, range(world)))
        for part, size in _split(ways, move.itemsize, world):
            if size > room or not found:
                found.append([])
                room = ROUND_BYTES * world
            found[-1].append((move, part))
            room -= size
    return found


def _split(ways: list[Route], size_of: int, world: int) -> list[tuple[list[Route], int]]:
    """Cut the routes of one tensor into parts of at most a round; blocks that are larger are cut along their rows."""
    parts: list[tuple[list[Route], int]] = []
    part: list[Route] = []
    size, limit = 0, ROUND_BYTES * world
    for way in ways:
        for block in _rows(way.block, max(1, ROUND_BYTES // size_of)):
            nbytes = block.numel * size_of
            if part and size + nbytes > limit:
                parts.append((part, size))
                part, size = [], 0
            part.append(way._replace(block=block))
            size += nbytes
    return [*parts, (part, size)] if part else parts


def _rows(block: Box, most: int) -> list[Box]:
    if block.numel <= most or not block.ndim:
        return [block]
    dim = next(d for d, size in enumerate(block.shape) if size > 1)
    rows = max(1, most * block.shape[dim] // block.numel)
    found = []
    for begin in range(0, block.shape[dim], rows):
        offset, shape = list(block.offset), list(block.shape)
        offset[dim] += begin
        shape[dim] = min(rows, shape[dim] - begin)
        found += _rows(Box(tuple(offset), tuple(shape)), most) if rows == 1 else [Box(tuple(offset), tuple(shape))]
    return found


def exchange(
    batch: Sequence[tuple[Move, Sequence[Route]]],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Move one group of blocks. All ranks call this with the same routes."""
    outgoing: list[list[tuple[Move, Route]]] = [[] for _ in range(world)]
    incoming: list[list[tuple[Move, Route]]] = [[] for _ in range(world)]
    for move, ways in batch:
        for way in ways:
            if way.source == way.target == rank:
                _target(move, way).copy_(_source(move, way))
            elif way.source == rank:
                outgoing[way.target].append((move, way))
            elif way.target == rank:
                incoming[way.source].append((move, way))
    if all(way.source == way.target for _, ways in batch for way in ways):
        return
    sizes_out, sizes_in = [[sum(map(_nbytes, peer)) for peer in side] for side in (outgoing, incoming)]
    sent = torch.empty(sum(sizes_out), dtype=torch.uint8, device=device)
    got = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    at = 0
    for move, way in (entry for peer in outgoing for entry in peer):
        block = _source(move, way)
        size = _nbytes((move, way))
        _as(sent[at : at + _used(move, way)], block).copy_(block)
        at += size
    dist.all_to_all_single(got, sent, sizes_in, sizes_out, group=group)
    at = 0
    for move, way in (entry for peer in incoming for entry in peer):
        block = _target(move, way)
        block.copy_(_as(got[at : at + _used(move, way)], block))
        at += _nbytes((move, way))


def _source(move: Move, way: Route) -> Tensor:
    box, view = move.old.parts[way.held]
    return view.detach()[way.block.slices(box)]


def _target(move: Move, way: Route) -> Tensor:
    box, view = move.new.parts[way.wanted]
    return view.detach()[way.block.slices(box)]


def _as(data: Tensor, like: Tensor) -> Tensor:
    return data.view(like.dtype).view(like.shape)


def _used(move: Move, way: Route) -> int:
    return way.block.numel * move.itemsize


def _nbytes(entry: tuple[Move, Route]) -> int:
    """Return the bytes of a block in a buffer: rounded up, so that the next one is aligned whatever its dtype."""
    return -(-_used(*entry) // 16) * 16
