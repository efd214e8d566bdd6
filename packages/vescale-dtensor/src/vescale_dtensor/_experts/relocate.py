"""Moving experts between ranks: their slices of parameters, gradients and optimizer state change places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._mesh import Axes
from .._spec import Spec
from .arrangement import positions_at
from .exchange import Traffic, exchange
from .routes import members_of


def holdings(cut: Spec, axes: Axes) -> list[list[int]]:
    """Positions of a stacked parameter that each rank of a group holds, in group order."""
    return [positions_at(cut, c) for c in members_of(cut.mesh, axes)]


def relocate(tensors: Sequence[Tensor], cut: Spec, axes: Axes, old: Sequence[int], new: Sequence[int]) -> None:
    """Move slices of stacked tensors from the order `old` to the order `new`, in place: one collective per dtype.

    Every rank of the group must call it.

    Args:
        tensors: local parts [positions of this rank, ...], plain.
        cut: spec that says who holds which positions.
        axes: mesh axes of the group.
        old: expert at each position now.
        new: expert at each position afterwards.
    """
    members = members_of(cut.mesh, axes)
    me = members.index(cut.mesh.coordinate)
    held = holdings(cut, axes)
    home = {old[p]: (rank, i) for rank, positions in enumerate(held) for i, p in enumerate(positions)}
    sends = [[home[new[p]][1] for p in positions if home[new[p]][0] == me] for positions in held]
    receives = [[i for i, p in enumerate(held[me]) if home[new[p]][0] == rank] for rank in range(len(held))]
    traffic = Traffic(cut.mesh, axes, [len(s) for s in sends], [len(r) for r in receives])
    send, receive = [i for s in sends for i in s], [i for r in receives for i in r]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    for group in by_dtype.values():
        _relocate(group, send, receive, traffic)


def _relocate(tensors: Sequence[Tensor], send: list[int], receive: list[int], traffic: Traffic) -> None:
    device = tensors[0].device
    out, into = torch.tensor(send, device=device), torch.tensor(receive, device=device)
    lengths = [math.prod(t.shape[1:]) for t in tensors]
    rows = torch.cat([t.index_select(0, out).reshape(len(send), n) for t, n in zip(tensors, lengths, strict=True)], 1)
    arrived = exchange(rows, traffic)
    for t, part in zip(tensors, torch.split(arrived, lengths, 1), strict=True):
        t.index_copy_(0, into, part.reshape(len(receive), *t.shape[1:]))
