"""How one call of an expert module lies on the mesh: what each axis is for, and where everything must be moved.

The placements of the parameters decide. Along an axis that cuts the stacked experts (`Shard(0)`) tokens are cut
too and travel. Along one that cuts inside experts (tensor parallelism) every rank sees the same tokens. Along all
others the experts are copies, and the tokens stay as they are: cut (data parallelism), or the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._irregular import Ragged, is_cut
from .._mesh import Axes, MeshInfo, mesh_info
from .._spec import Spec, spec_of
from ..errors import MeshMismatchError, UnsupportedOperationError
from ..placements import AxisTypes, I, P, R, short
from .routes import Residents, members_of


@dataclass(frozen=True, slots=True)
class Inside:
    """The mesh axes that cut inside of experts, as a mesh of their own."""

    mesh: MeshInfo
    """The submesh."""
    axes: Axes
    """Its axes in the whole mesh."""

    def spec(self, shape: Sequence[int], types: AxisTypes) -> Spec:
        """Spec of a tensor on the submesh, by its types on the whole mesh."""
        return spec_of(self.mesh, shape, tuple(types[a] for a in self.axes))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Types for one combination of input and parameter specs."""

    mesh: MeshInfo
    """The mesh."""
    tokens: AxisTypes
    """What inputs are moved to."""
    parameters: dict[str, AxisTypes]
    """What each parameter is moved to."""
    back: AxisTypes
    """What the result is moved to at the end; entries of axes inside experts do not count."""
    counted: Axes
    """Axes along which ranks have different tokens."""
    residents: Residents
    """Where the experts live."""
    inside: Inside | None
    """Tensor parallelism within experts."""


def arrange(
    tokens: Spec,
    weights: Spec,
    parameters: Mapping[str, Spec],
    num_experts: int,
    order: Sequence[int],
    device: torch.device,
) -> Arrangement:
    """Work out a call.

    Args:
        tokens: spec of the hidden states, [tokens, features].
        weights: spec of the router's weights, [tokens, top-k].
        parameters: specs of the expert module's parameters by name; stacked ones are [experts, ...].
        num_experts: their number.
        order: which expert each position of the stacked parameters holds.
        device: where to keep the tables of owners.

    Raises:
        MeshMismatchError: not all lie on one mesh.
        UnsupportedOperationError: parameters are cut in ways that do not fit each other.
    """
    mesh = tokens.mesh
    for name, spec in {"the router's weights": weights, **parameters}.items():
        if spec.mesh is not mesh:
            raise MeshMismatchError(f"{name} lies on {spec.mesh!r}, the tokens on {mesh!r}")
    stacked = {n: s for n, s in parameters.items() if s.ndim > 1 and s.shape[0] == num_experts}
    expert = expert_axes(list(stacked.values()))
    inside = tuple(
        a for a in range(mesh.ndim) if a not in expert and any(is_cut(s.types[a]) for s in parameters.values())
    )
    _require(stacked, parameters, expert, mesh)
    types = tuple(
        0 if a in expert else R if a in inside else _data(tokens.types[a], weights.types[a]) for a in range(mesh.ndim)
    )
    wanted = {
        n: tuple(t if is_cut(t) else I if types[a] == I else R for a, t in enumerate(s.types))
        for n, s in parameters.items()
    }
    back = tuple(
        t if a not in expert else tokens.types[a] if tokens.types[a] in (0, I, R) else 0 for a, t in enumerate(types)
    )
    cut = next(iter(stacked.values()))
    return Arrangement(
        mesh,
        types,
        wanted,
        back,
        tuple(a for a, t in enumerate(types) if t == 0),
        _residents(cut, expert, order, device),
        _inside(mesh, inside) if inside else None,
    )


def expert_axes(stacked: Sequence[Spec]) -> Axes:
    """Mesh axes over which the experts of stacked parameters are spread."""
    return tuple(a for a in range(stacked[0].mesh.ndim) if any(_by_experts(s.types[a]) for s in stacked))


def _by_experts(axis_type: int) -> bool:
    """Whether an axis of this type gives every rank some whole experts of a stacked parameter."""
    return axis_type == 0 or (isinstance(axis_type, Ragged) and axis_type.lead == 1)


def _data(tokens: int, weights: int) -> int:
    """Type of the tokens along an axis on which the experts are copies."""
    if 0 in (tokens, weights):
        return 0
    return R if R in (tokens, weights) else I


def _require(stacked: Mapping[str, Spec], parameters: Mapping[str, Spec], expert: Axes, mesh: MeshInfo) -> None:
    """Every stacked parameter must be cut alike along the expert axes, and no other one there."""
    for name, spec in parameters.items():
        if P in spec.types:
            raise UnsupportedOperationError(
                f"expert parameter {name!r} is a pending sum ({short(spec.types)}) on {mesh!r}; redistribute it to "
                "Replicate() or Shard(dim)"
            )
        for axis in expert:
            first, cut = next((n, s.types[axis]) for n, s in stacked.items() if _by_experts(s.types[axis]))
            here = spec.types[axis]
            if (here != cut) if name in stacked else is_cut(here):
                raise UnsupportedOperationError(
                    f"expert parameter {name!r} is placed ({short(spec.types)}), but {first!r} is cut into experts "
                    f"along the mesh axis {mesh.axis_name(axis)!r}; place all stacked parameters of a module alike "
                    "there, and the others Replicate()"
                )


def _residents(cut: Spec, axes: Axes, order: Sequence[int], device: torch.device) -> Residents:
    owner, place = [0] * len(order), [0] * len(order)
    for member, coordinate in enumerate(members_of(cut.mesh, axes)):
        for here, position in enumerate(positions_at(cut, coordinate)):
            owner[order[position]], place[order[position]] = member, here
    return Residents(
        cut.mesh, axes, torch.tensor(owner, device=device), torch.tensor(place, device=device), cut.local_shape[0]
    )


def positions_at(spec: Spec, coordinate: Sequence[int]) -> list[int]:
    """Positions of a stacked parameter that the rank at `coordinate` holds, in the order of its local part."""
    found = dict.fromkeys(
        position for offset, shape in spec.boxes_of(coordinate) for position in range(offset[0], offset[0] + shape[0])
    )
    return list(found)


def _inside(mesh: MeshInfo, axes: Axes) -> Inside:
    names = mesh.device_mesh.mesh_dim_names
    if names is None:
        raise UnsupportedOperationError(
            f"experts that are cut inside (tensor parallelism) need a mesh whose axes have names, {mesh!r} has none; "
            "make it with mesh_dim_names"
        )
    chosen = tuple(names[a] for a in axes)
    return Inside(mesh_info(mesh.device_mesh[chosen if len(chosen) > 1 else chosen[0]]), axes)
