"""The experts of one module as `ExpertsAllocator` sees them: who holds which, what they had to do, and moving them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from .._comm.move import strip
from .._mesh import Axes, MeshInfo
from .._spec import Spec
from .._tensor import DTensor
from ..errors import DTensorError
from .arrangement import expert_axes
from .homes import owners_of, rehome
from .lists import ListState
from .relocate import holdings, relocate
from .routes import Load, members_of
from .stacked import State, state_of

Optimizers = Sequence[torch.optim.Optimizer]


class Counts(Protocol):
    """What is counted of a module's experts."""

    num_experts: int
    load: Load | None


class Group(Protocol):
    """The experts of one module."""

    @property
    def counts(self) -> Counts:
        """What is counted."""

    def held(self) -> list[list[int]]:
        """Positions that each rank of the group has."""

    def order(self) -> list[int]:
        """Expert at each position."""

    def place(self, order: Sequence[int], optimizers: Optimizers) -> None:
        """Move experts. Every rank must call it."""

    def misleads(self) -> bool:
        """Whether state would now be taken for that of other experts."""


class Stacked:
    """Experts in stacked parameters: they swap positions, which keep their ranks."""

    def __init__(self, name: str, module: nn.Module, state: State) -> None:
        self.name, self.module, self.counts = name, module, state

    def held(self) -> list[list[int]]:
        return holdings(*self._cut())

    def order(self) -> list[int]:
        return self.counts.order

    def misleads(self) -> bool:
        return self.counts.moved

    def place(self, order: Sequence[int], optimizers: Optimizers) -> None:
        cut, axes = self._cut()
        old = self.order()
        parts, wholes = self._tensors(axes, optimizers)
        with torch.no_grad():
            relocate(parts, cut, axes, old, order)
            for whole in wholes:
                whole.copy_(whole[[old.index(e) for e in order]])
        self.counts.place(order)

    def _cut(self) -> tuple[Spec, Axes]:
        """Spec of a stacked parameter, and the mesh axes that its experts are spread over."""
        own: list[Tensor | None] = [*self.module._parameters.values()]
        specs = [p._spec for p in own if isinstance(p, DTensor) and self.counts.is_stacked(p._spec.shape)]
        if not specs:
            raise ValueError(f"the experts of {self.name} are not distributed yet; call parallelize_module before")
        return specs[0], expert_axes(specs)

    def _tensors(self, axes: Axes, optimizers: Optimizers) -> tuple[list[Tensor], list[Tensor]]:
        """Local parts of all that belongs to the experts: parameters, gradients, optimizer state.

        Returns:
            Those that are cut as the parameters are, and those that have all experts on every rank.
        """
        parts: list[Tensor] = []
        wholes: list[Tensor] = []
        for own, p in self.module._parameters.items():
            if not isinstance(p, DTensor) or not self.counts.is_stacked(p._spec.shape):
                continue
            local = strip(p).detach()
            parts.append(local)
            held = {"its gradient": p.grad}
            for optimizer in optimizers:
                held |= {f"state {k!r} of {type(optimizer).__name__}": v for k, v in optimizer.state.get(p, {}).items()}
            for what, value in held.items():
                if not isinstance(value, Tensor) or value.numel() == 1 or _is_one_for_all(value, p._spec):
                    continue
                if isinstance(value, DTensor) and _has_all(value._spec, self.counts.num_experts):
                    wholes.append(strip(value).detach())
                else:
                    parts.append(_following(value, local, p._spec, axes, f"{what} for {self.name}.{own}"))
        return parts, wholes


def _is_one_for_all(value: Tensor, spec: Spec) -> bool:
    """Whether a state is one thing for all experts, such as Adafactor's means of columns: the same in any order."""
    return isinstance(value, DTensor) and value._spec.ndim == spec.ndim and value._spec.shape[0] == 1


def _has_all(spec: Spec, num_experts: int) -> bool:
    """Whether every rank has something of all experts."""
    return spec.ndim > 0 and spec.shape[0] == num_experts and 0 not in spec.sharded


def _following(value: Tensor, local: Tensor, spec: Spec, axes: Axes, what: str) -> Tensor:
    """Local part of a tensor that is laid out as a parameter is, along the axes of experts."""
    there = value._spec if isinstance(value, DTensor) else None
    value = strip(value).detach() if isinstance(value, DTensor) else value
    alike = there is None or (there.shape[:1] == spec.shape[:1] and all(there.types[a] == spec.types[a] for a in axes))
    if not alike or value.shape[:1] != local.shape[:1]:
        raise DTensorError(
            f"{what} has shape {list(value.shape)} ({there!r}), which does not follow the experts of "
            f"{spec!r}; an optimizer that keeps such state cannot be used with ExpertsAllocator"
        )
    return value


class Listed:
    """Experts in a `nn.ModuleList`: they change their placements, and keep their names.

    Positions are those of the experts in the order of their ranks.
    """

    def __init__(self, name: str, block: nn.Module, state: ListState) -> None:
        self.name, self.block, self.counts = name, block, state

    def held(self) -> list[list[int]]:
        owners, _, size, _ = self._lie()
        order = self.order()
        return [[i for i, e in enumerate(order) if owners[e] == rank] for rank in range(size)]

    def order(self) -> list[int]:
        owners = self._lie()[0]
        return sorted(range(len(owners)), key=lambda e: owners[e])

    def misleads(self) -> bool:
        return False

    def place(self, order: Sequence[int], optimizers: Optimizers) -> None:
        _, mesh, _, axes = self._lie()
        new = [0] * len(order)
        for rank, positions in enumerate(self.held()):
            for i in positions:
                new[order[i]] = rank
        with torch.no_grad():
            rehome(self._experts(), mesh, axes, new, optimizers)

    def _experts(self) -> list[nn.Module]:
        return list(getattr(self.block, self.counts.child))

    def _lie(self) -> tuple[list[int], MeshInfo, int, Axes]:
        """Owners of the experts, the mesh, the number of ranks that share them, and the axes of these."""
        placed = next((p for p in self.block.parameters() if isinstance(p, DTensor)), None)
        if placed is None:
            raise ValueError(f"the experts of {self.name} are not distributed yet; call parallelize_module before")
        mesh = placed._spec.mesh
        axes = self.counts.axes_of(mesh)
        return owners_of(self._experts(), mesh, axes), mesh, len(members_of(mesh, axes)), axes


def groups_of(module: nn.Module) -> Iterator[tuple[str, Group]]:
    """The modules below `module` whose tokens travel, with their names."""
    for name, owner in module.named_modules():
        stacked = state_of(owner)
        if stacked is not None:
            yield name, Stacked(name, owner, stacked)
        listed = owner.__dict__.get("_vescale_block")
        if listed is not None:
            yield name, Listed(name, owner, listed)
