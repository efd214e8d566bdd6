"""Where listed experts live, which the placements of their parameters say, and moving them to other ranks.

An expert in a list is the same tensors wherever it lives, so that moving it changes placements and nothing else:
names, state dicts and optimizer states go on to mean what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._comm.move import strip
from .._irregular import Ragged, ragged
from .._mesh import Axes, MeshInfo
from .._spec import Spec
from .._tensor import DTensor, make
from ..errors import DTensorError, UnsupportedOperationError
from ..placements import short
from .exchange import Traffic, exchange
from .routes import Residents, members_of


def home_of(spec: Spec, axes: Axes) -> tuple[int, ...] | None:
    """Coordinates, along the axes, of the one rank that has all of a tensor; None if there is none."""
    found = []
    for a in axes:
        t = spec.types[a]
        if not isinstance(t, Ragged) or t.lead != 1 or max(t.units) != t.stops[-1]:
            return None
        found.append(t.units.index(t.stops[-1]))
    return tuple(found)


def owners_of(experts: Iterable[nn.Module], mesh: MeshInfo, axes: Axes) -> list[int]:
    """Owner of each expert, as its position in the group of the axes.

    Raises:
        UnsupportedOperationError: a parameter does not lie whole on the rank that has the rest of its expert.
    """
    homes = [tuple(c[a] for a in axes) for c in members_of(mesh, axes)]
    found = []
    for e, expert in enumerate(experts):
        first = None
        for name, p in expert.named_parameters():
            home = home_of(p._spec, axes) if isinstance(p, DTensor) else None
            first = home if first is None else first
            if home is None or home != first:
                placed = short(p._spec.types) if isinstance(p, DTensor) else "on no mesh"
                raise UnsupportedOperationError(
                    f"parameter {name!r} of expert {e} is placed ({placed}) on {mesh!r}; each expert of a list must "
                    "lie whole on one rank of the axes of experts, as expert_parallel places it"
                )
        assert first is not None
        found.append(homes.index(first))
    return found


def residents_at(owners: Sequence[int], mesh: MeshInfo, axes: Axes, device: torch.device) -> Residents:
    """What routes need to know: each expert's owner, and its place among the owner's experts."""
    places = [sum(o == owner for o in owners[:e]) for e, owner in enumerate(owners)]
    me = members_of(mesh, axes).index(mesh.coordinate)
    owner, place = torch.tensor(owners, device=device), torch.tensor(places, device=device)
    return Residents(mesh, axes, owner, place, list(owners).count(me))


# ------------------------------------------------------------------ moving


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of an expert that moves."""

    value: DTensor
    """As it lies now."""
    put: Callable[[DTensor], None]
    """Takes it as it lies afterwards."""
    source: int
    """Position of the owner in the group."""
    target: int
    """Position of the new owner."""


def rehome(
    experts: Sequence[nn.Module],
    mesh: MeshInfo,
    axes: Axes,
    new: Sequence[int],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Move experts to other ranks of the group: one collective per dtype. Every rank of the group must call it.

    Args:
        experts: all experts of the list.
        mesh: their mesh.
        axes: mesh axes of the group.
        new: owner of each expert afterwards, as its position in the group.
        optimizers: what may have state of the experts, which goes with them.
    """
    old = owners_of(experts, mesh, axes)
    parts = [
        part
        for expert, source, target in zip(experts, old, new, strict=True)
        if source != target
        for name, p in expert.named_parameters()
        for part in _parts(name, p, axes, source, target, optimizers)
    ]
    by_dtype: dict[torch.dtype, list[_Part]] = {}
    for part in parts:
        by_dtype.setdefault(part.value.dtype, []).append(part)
    for group in by_dtype.values():
        _send(group, mesh, axes)


def _parts(
    name: str, p: Any, axes: Axes, source: int, target: int, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterable[_Part]:
    """A parameter, its gradient, and the state that optimizers keep of it and that lies as it does."""
    if p._backward_hooks:
        raise DTensorError(f"{name} has gradient hooks, which would not fit it on another rank; remove them first")
    grad = p.grad
    p.grad = None  # it would follow by itself, with a collective of its own

    def put(value: DTensor) -> None:
        p.data = value

    yield _Part(p, put, source, target)
    if grad is not None:
        yield _Part(grad, lambda value: setattr(p, "grad", value), source, target)
    for optimizer in optimizers:
        held = optimizer.state.get(p, {})
        for key, value in held.items():
            if _lies_as(value, p._spec, axes):
                yield _Part(value, lambda moved, held=held, key=key: held.__setitem__(key, moved), source, target)  # type: ignore[misc]
            elif isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise DTensorError(
                    f"state {key!r} of {type(optimizer).__name__} for {name} is a plain tensor of shape "
                    f"{list(value.shape)}, which cannot follow its expert; call ExpertsAllocator after the optimizer's "
                    "first step"
                )


def _lies_as(value: Any, spec: Spec, axes: Axes) -> bool:
    """Whether a value is cut as its parameter is; what is laid out otherwise means the same wherever experts live."""
    if not isinstance(value, DTensor) or value._spec.shape != spec.shape:
        return False
    return all(value._spec.types[a] == spec.types[a] for a in axes)


def _send(parts: Sequence[_Part], mesh: MeshInfo, axes: Axes) -> None:
    members = members_of(mesh, axes)
    me = members.index(mesh.coordinate)
    leaving = [[p for p in parts if (p.source, p.target) == (me, r)] for r in range(len(members))]
    arriving = [[p for p in parts if (p.source, p.target) == (r, me)] for r in range(len(members))]
    sizes = [[sum(p.value.numel() for p in of_rank) for of_rank in side] for side in (leaving, arriving)]
    nothing = strip(parts[0].value).detach().reshape(-1)[:0]
    sent = torch.cat([nothing, *[strip(p.value).detach().reshape(-1) for ps in leaving for p in ps]])
    arrived = exchange(sent, Traffic(mesh, axes, *sizes))
    pieces = iter(torch.split(arrived, [p.value.numel() for ps in arriving for p in ps]))
    received = {id(p): next(pieces) for ps in arriving for p in ps}
    for part in parts:
        spec = _spec_at(part.value._spec, axes, members[part.target])
        piece = received.get(id(part))
        local = nothing.new_empty(spec.local_shape) if piece is None else piece.view(spec.local_shape).clone()
        part.put(make(local, spec))


def _spec_at(spec: Spec, axes: Axes, coordinate: tuple[int, ...]) -> Spec:
    """The same tensor, whole on the ranks that have these coordinates along the axes."""
    types = list(spec.types)
    for a in axes:
        types[a] = ragged(1, [int(r == coordinate[a]) for r in range(spec.mesh.sizes[a])])
    return spec.with_types(tuple(types))
