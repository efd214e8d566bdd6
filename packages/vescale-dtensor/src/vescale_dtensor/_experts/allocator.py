"""`ExpertsAllocator`: counts what the router gives each expert, and moves experts so that ranks have equal work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._comm.move import strip
from .._mesh import Axes
from .._spec import Spec
from .._tensor import DTensor
from ..errors import DTensorError
from .arrangement import expert_axes
from .balance import balance, lower_bound, rank_loads, settle
from .relocate import holdings, relocate
from .stacked import State, state_of


@dataclass(frozen=True, slots=True)
class Move:
    """What `ExpertsAllocator` does, or would do, with the experts of one module."""

    order: tuple[int, ...]
    """Expert at each position of the stacked parameters afterwards."""
    moved: int
    """Experts that change their rank."""
    before: int
    """Choices that the busiest rank had to serve."""
    after: int
    """Choices that the busiest rank would have served so."""
    bound: int
    """What no assignment could beat."""


class ExpertsAllocator:
    """Moves the experts of a parallelized model between ranks by their load.

    Positions of the stacked parameters keep their ranks; experts swap positions, with their gradients and optimizer
    state, and the router's numbers go on to mean the same experts. Training gives what it would have given, up to the
    rounding of reordered sums. While experts are not where the model's code has them, `state_dict` and
    `load_state_dict` of the experts and of the optimizers refuse; `restore()` first.

    Args:
        module: a module parallelized with `expert_parallel`.
        optimizers: the optimizer, or several, that hold state of the experts.
        tolerance: move only where the busiest rank has more than this multiple of the least possible.

    Raises:
        ValueError: the module has no experts whose tokens travel.

    >>> allocator = ExpertsAllocator(model, optimizer)  # doctest: +SKIP
    >>> for step, batch in enumerate(batches):  # doctest: +SKIP
    ...     train(batch)
    ...     if step % 100 == 99:
    ...         allocator.step()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        tolerance: float = 1.05,
    ) -> None:
        if tolerance < 1:
            raise ValueError(f"tolerance = {tolerance}: nothing is better than the least possible; give 1 or more")
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.tolerance = tolerance
        self._modules = {n: (m, s) for n, m in module.named_modules() if (s := state_of(m)) is not None}
        if not self._modules:
            raise ValueError(
                f"module = {type(module).__name__} has no experts whose tokens travel; parallelize it with "
                'parallelize_module(module, mesh, [..., expert_parallel("ep")])'
            )
        for _, state in self._modules.values():
            state.load = {}
        for optimizer in self.optimizers:
            optimizer.register_state_dict_pre_hook(self._refuse)
            optimizer.register_load_state_dict_pre_hook(self._refuse_loading)

    def loads(self) -> dict[str, list[int]]:
        """Choices of each expert since the last move or `reset`, by module. Every rank must call it."""
        return {name: _summed(module, state) for name, (module, state) in self._modules.items()}

    def reset(self) -> None:
        """Forget what was counted."""
        for _, state in self._modules.values():
            state.load = {}

    def plan(self) -> dict[str, Move]:
        """What `step` would do now, for the modules where it would do something. Every rank must call it."""
        return {n: move for n, loads in self.loads().items() if (move := self._move(n, loads)) is not None}

    def step(self) -> dict[str, Move]:
        """Move experts where that pays, and start counting anew; call it between two training steps, on every rank."""
        moves = self.plan()
        for name, move in moves.items():
            self._place(name, move.order)
        self.reset()
        return moves

    def restore(self) -> None:
        """Bring every expert back to the position that the model's code gives it. Every rank must call it."""
        for name, (_, state) in self._modules.items():
            if state.moved:
                self._place(name, range(state.num_experts))

    # ---------------------------------------------------------------- one module

    def _move(self, name: str, loads: list[int]) -> Move | None:
        module, state = self._modules[name]
        cut, axes = _cut(name, module, state)
        held = holdings(cut, axes)
        owner = [0] * state.num_experts
        for rank, positions in enumerate(held):
            for position in positions:
                owner[state.order[position]] = rank
        new = balance(loads, owner, len(held), tolerance=self.tolerance)
        moved = sum(a != b for a, b in zip(owner, new, strict=True))
        if not moved:
            return None
        before, after = (max(rank_loads(loads, o, len(held))) for o in (owner, new))
        order = settle(state.order, held, new)
        return Move(tuple(order), moved, before, after, lower_bound(loads, len(held)))

    def _place(self, name: str, order: Sequence[int]) -> None:
        module, state = self._modules[name]
        cut, axes = _cut(name, module, state)
        with torch.no_grad():
            relocate(self._tensors(name, module, state, axes), cut, axes, state.order, order)
        state.place(order)

    def _tensors(self, name: str, module: nn.Module, state: State, axes: Axes) -> list[Tensor]:
        """Local parts of all that belongs to the experts of a module: parameters, gradients, optimizer state."""
        found: list[Tensor] = []
        for own, p in module._parameters.items():
            if not isinstance(p, DTensor) or not state.is_stacked(p._spec.shape):
                continue
            local = strip(p).detach()
            found.append(local)
            held = {"its gradient": p.grad}
            for optimizer in self.optimizers:
                held |= {f"state {k!r} of {type(optimizer).__name__}": v for k, v in optimizer.state.get(p, {}).items()}
            for what, value in held.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    found.append(_like(value, local, p._spec, axes, f"{what} for {name}.{own}"))
        return found

    # ---------------------------------------------------------------- states that would be taken for ordered ones

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        if any(state.moved for _, state in self._modules.values()):
            raise DTensorError(
                f"{type(optimizer).__name__}: experts are not where the model's code has them, so its state would fit "
                "no other run; call ExpertsAllocator.restore() on every rank first"
            )

    def _refuse_loading(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        self._refuse(optimizer)


def _cut(name: str, module: nn.Module, state: State) -> tuple[Spec, Axes]:
    """Spec of a stacked parameter, and the mesh axes that its experts are spread over."""
    own: list[Tensor | None] = [*module._parameters.values()]
    specs = [p._spec for p in own if isinstance(p, DTensor) and state.is_stacked(p._spec.shape)]
    if not specs:
        raise ValueError(f"the experts of {name} are not distributed yet; call parallelize_module before")
    return specs[0], expert_axes(specs)


def _like(value: Tensor, local: Tensor, spec: Spec, axes: Axes, what: str) -> Tensor:
    """Local part of a tensor that is laid out as a parameter is, along the axes of experts."""
    there = value._spec if isinstance(value, DTensor) else None
    value = strip(value).detach() if isinstance(value, DTensor) else value
    alike = there is None or (there.shape == spec.shape and all(there.types[a] == spec.types[a] for a in axes))
    if not alike or value.shape[:1] != local.shape[:1]:
        raise DTensorError(
            f"{what} has shape {list(value.shape)} ({there!r}), which does not follow the experts of "
            f"{spec!r}; an optimizer that keeps such state cannot be used with ExpertsAllocator"
        )
    return value


def _summed(module: nn.Module, state: State) -> list[int]:
    """Choices by expert, over all ranks that had different tokens."""
    total = torch.zeros(state.num_experts, dtype=torch.int64)
    for (mesh, axes), load in (state.load or {}).items():
        counted = load.clone()
        if mesh.size_of(axes) > 1:
            dist.all_reduce(counted, group=mesh.group(axes))
        total += counted.cpu()
    return [int(n) for n in total.tolist()]
