"""Sends the blocks of many tensors in uneven all-to-alls, through one buffer of bytes per direction.

All ranks go through the same rounds. Which ones follows from how much the busiest rank sends or gets of each tensor, so
the buffers of every rank stay small, even where one rank has what all others need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._geometry import Box, Piece
from .._state import Held, itemsize
from .routes import Route, incoming, outgoing

__all__ = ["ROUND_BYTES", "Exchange", "Move", "Part", "rounds"]

ROUND_BYTES = 64 << 20
"""A rank sends, and gets, about this much at a time."""
ALIGN = 16
"""Blocks begin at multiples of this many bytes in a buffer, so that they can be seen as elements of any dtype."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor."""

    old: Held
    """Where its values are."""
    new: Held
    """Where they have to go."""


class Part(NamedTuple):
    """A share of every block of a tensor."""

    move: int
    """Number of the tensor."""
    share: int
    """Which share."""
    shares: int
    """How many there are."""


class _Entry(NamedTuple):
    """A block in a buffer."""

    view: Tensor
    """The memory that it comes from or goes to."""
    nbytes: int
    """Bytes of its elements."""


def rounds(loads: Sequence[int], limit: int) -> list[list[Part]]:
    """Return what is moved together.

    Args:
        loads: bytes of each tensor that the busiest rank sends or gets.
        limit: bytes that a rank sends or gets per round.

    Example:
        >>> rounds([3, 0, 4, 25], 10)
        [[Part(move=0, share=0, shares=1), Part(move=2, share=0, shares=1)], [Part(move=3, share=0, shares=3)], \
[Part(move=3, share=1, shares=3)], [Part(move=3, share=2, shares=3)]]
    """
    found: list[list[Part]] = []
    room = 0
    for number, load in enumerate(loads):
        shares = -(-load // limit)
        for share in range(shares):
            size = -(-load // shares)
            if size > room:
                found.append([])
                room = limit
            found[-1].append(Part(number, share, shares))
            room -= size
    return found


class Exchange:
    """The moves of one rank. First all ranks agree on the loads, then each calls `prepare`, then all call `run`."""

    def __init__(self, moves: Sequence[Move], rank: int, world: int) -> None:
        """Plan.

        Args:
            moves: the tensors, the same ones on all ranks.
            rank: number of this rank in the group.
            world: ranks in the group.
        """
        self._moves, self._rank, self._world = moves, rank, world
        self._in: list[list[Route]] = []
        self._out: list[list[Route]] = []
        for turn, move in enumerate(moves):
            spec, new = move.old.spec, move.new.spec.layout
            self._in.append(incoming(spec.shape, spec.layout, new, rank, turn))
            self._out.append(outgoing(spec.shape, spec.layout, new, rank, turn))

    def loads(self) -> list[int]:
        """Return for each tensor the bytes that this rank sends or gets, whichever is more."""
        return [
            max(self._bytes(number, gets), self._bytes(number, sends))
            for number, (gets, sends) in enumerate(zip(self._in, self._out, strict=True))
        ]

    def _bytes(self, number: int, routes: Sequence[Route]) -> int:
        size = itemsize(self._moves[number].old.spec.dtype)
        return sum(_padded(route.block.numel * size) for route in routes if route.source != route.target)

    def prepare(self, loads: Sequence[int], device: torch.device, limit: int = ROUND_BYTES) -> None:
        """Cut the work into rounds and make the buffers, so that nothing is left that fails on one rank only.

        Args:
            loads: of the busiest rank, per tensor.
            device: where the group's backend takes buffers from.
            limit: bytes per round.
        """
        self._rounds = [(self._side(parts, True), self._side(parts, False)) for parts in rounds(loads, limit)]
        sizes = [[_total(peers) for peers in sides] for sides in self._rounds]
        self._sent, self._got = (
            torch.empty(max((pair[side] for pair in sizes), default=0), dtype=torch.uint8, device=device)
            for side in (0, 1)
        )

    def run(self, group: dist.ProcessGroup | None) -> None:
        """Copy what this rank has itself, and send and receive the rest."""
        with torch.no_grad():
            for move, routes in zip(self._moves, self._in, strict=True):
                for route in routes:
                    if route.source == route.target:
                        views = (_view(move.new, route.wanted, route.block), _view(move.old, route.held, route.block))
                        to, source = views if any(map(_is_lazy, views)) else map(_words, views)
                        to.copy_(source)
            for outgoing_, incoming_ in self._rounds:
                sent, got = self._sent[: _total(outgoing_)], self._got[: _total(incoming_)]
                for place, view in _places(sent, outgoing_):
                    place.copy_(view)
                sizes_out, sizes_in = list(map(_size, outgoing_)), list(map(_size, incoming_))
                dist.all_to_all_single(got, sent, sizes_in, sizes_out, group=group)
                for place, view in _places(got, incoming_):
                    view.copy_(place)

    def _side(self, parts: Sequence[Part], sends: bool) -> list[list[_Entry]]:
        """Return what goes through one buffer in a round, by peer."""
        peers: list[list[_Entry]] = [[] for _ in range(self._world)]
        for part in parts:
            move = self._moves[part.move]
            for route in (self._out if sends else self._in)[part.move]:
                if route.source == route.target:
                    continue
                held, number = (move.old, route.held) if sends else (move.new, route.wanted)
                peer = peers[route.target if sends else route.source]
                for box in _share(route.block, part):
                    view = _view(held, number, box)
                    words = view if _is_lazy(view) else _words(view)
                    peer.append(_Entry(words, box.numel * itemsize(held.spec.dtype)))
        return peers


def _share(block: Box, part: Part) -> list[Box]:
    if part.shares == 1:
        return [block]
    start, stop = (block.numel * (part.share + more) // part.shares for more in (0, 1))
    return Piece(block, start, stop).boxes()


def _view(held: Held, number: int, block: Box) -> Tensor:
    """Return the memory of a block."""
    box, view = held.parts[number]
    return view.detach()[block.slices(box)]


def _is_lazy(view: Tensor) -> bool:
    """Tell whether the memory holds other values than the tensor shows, so that it is not for bytes to be copied."""
    return view.is_conj() or view.is_neg()


def _words(view: Tensor) -> Tensor:
    """Return elements as integers, as which those of every dtype can be copied."""
    return view.view(_WORDS[view.element_size()]) if view.element_size() in _WORDS else view


def _places(buffer: Tensor, peers: Iterable[Iterable[_Entry]]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield each block of a buffer, in the shape and dtype of its memory, and that memory."""
    at = 0
    for view, nbytes in (entry for peer in peers for entry in peer):
        yield buffer[at : at + nbytes].view(view.dtype).view(view.shape), view
        at += _padded(nbytes)


def _total(peers: Iterable[Iterable[_Entry]]) -> int:
    return sum(map(_size, peers))


def _size(entries: Iterable[_Entry]) -> int:
    return sum(_padded(entry.nbytes) for entry in entries)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
