"""Which token goes where: from the router's choices to rows of an all-to-all.

A *choice* is one (token, expert) pair. A token is sent once to a rank, however many of its experts live there;
the choices travel beside it as numbers. There is no capacity: what the router wants is done, none is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._mesh import Axes, MeshInfo
from .exchange import Traffic, exchange

Load = dict[tuple[MeshInfo, Axes], Tensor]
"""Choices by expert, [experts], int64, by the mesh axes along which ranks have different tokens."""


def members_of(mesh: MeshInfo, axes: Axes) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of the ranks of a group, in group order; this rank alone where there are no axes."""
    return mesh.members(axes) if axes else (mesh.coordinate,)


@dataclass(frozen=True, slots=True)
class Residents:
    """Where each expert lives within a group of ranks."""

    mesh: MeshInfo
    """Mesh that the ranks belong to."""
    axes: Axes
    """Mesh axes that the group spans."""
    owner: Tensor
    """[experts], int64: position of the owner in the group."""
    place: Tensor
    """[experts], int64: position among the owner's experts."""
    num_local: int
    """Experts on this rank."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.mesh.size_of(self.axes)


@dataclass(frozen=True, slots=True)
class Routes:
    """What this rank sends, and what it got to do."""

    tokens: Tensor
    """[rows sent], int64: local token of each row."""
    choices: Tensor
    """[choices sent], int64: position of each choice in the flattened [tokens, top-k] choices."""
    rows: Traffic
    """Numbers of rows."""
    pairs: Traffic
    """Numbers of choices."""
    row_of: Tensor
    """[choices received], int64: the received row that each is about."""
    expert_of: Tensor
    """[choices received], int64: the local expert that each asks for."""


def routes(chosen: Tensor, residents: Residents) -> Routes:
    """Agree with the other ranks of the group on who sends what. Every rank of the group must call it.

    Args:
        chosen: [tokens, top-k], an integer type: the experts of each local token.
        residents: where they live.

    Raises:
        IndexError: an expert number is out of range.
    """
    size, top_k = residents.size, chosen.shape[1]
    flat = _checked(chosen.reshape(-1).to(torch.int64), residents)
    owner = residents.owner[flat]
    choices = torch.argsort(owner, stable=True)
    owner, token = owner[choices], choices // top_k
    first = torch.ones_like(owner, dtype=torch.bool)
    first[1:] = (owner[1:] != owner[:-1]) | (token[1:] != token[:-1])
    tokens = token[first]
    row = first.cumsum(0) - 1
    num_rows = torch.bincount(owner[first], minlength=size)
    num_pairs = torch.bincount(owner, minlength=size)
    start = num_rows.cumsum(0) - num_rows
    described = torch.stack((row - start[owner], residents.place[flat[choices]]), 1)

    ones = [1] * size
    counts = torch.stack((num_rows, num_pairs), 1)
    arriving = exchange(counts, Traffic(residents.mesh, residents.axes, ones, ones))
    (rows_out, pairs_out), (rows_in, pairs_in) = counts.t().tolist(), arriving.t().tolist()
    rows = Traffic(residents.mesh, residents.axes, rows_out, rows_in)
    pairs = Traffic(residents.mesh, residents.axes, pairs_out, pairs_in)
    received = exchange(described, pairs)
    base = torch.repeat_interleave(arriving[:, 0].cumsum(0) - arriving[:, 0], arriving[:, 1])
    return Routes(tokens, choices, rows, pairs, received[:, 0] + base, received[:, 1])


def _checked(flat: Tensor, residents: Residents) -> Tensor:
    """Refuse expert numbers that do not exist; on an accelerator its own index check does."""
    if flat.device.type == "cpu" and flat.numel():
        low, high = (int(v) for v in torch.aminmax(flat))
        if low < 0 or high >= residents.owner.numel():
            raise IndexError(
                f"the router chose expert {low if low < 0 else high}; there are {residents.owner.numel()} experts, "
                "numbered from 0"
            )
    return flat
