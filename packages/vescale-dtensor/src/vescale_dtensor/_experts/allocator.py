"""`ExpertsAllocator`: counts what the router gives each expert, and moves experts so that ranks have equal work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import DTensorError
from .balance import balance, lower_bound, rank_loads, settle
from .groups import Counts, Stacked, groups_of


@dataclass(frozen=True, slots=True)
class Move:
    """What `ExpertsAllocator` does, or would do, with the experts of one module."""

    order: tuple[int, ...]
    """Expert at each position of the stacked parameters afterwards; of listed experts, all in the order of ranks."""
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

    Gradients and optimizer state go with the experts, and the router's numbers go on to mean the same ones. Training
    gives what it would have given, up to the rounding of reordered sums.

    Stacked experts swap positions in their parameters. While they are not where the model's code has them,
    `state_dict` and `load_state_dict` of the experts and of the optimizers refuse; `restore()` first. Experts of a
    `nn.ModuleList` change their placements only: state dicts stay what they are.

    Args:
        module: a module parallelized with `expert_parallel`.
        optimizers: the optimizer, or several, that hold state of the experts.
        tolerance: move only where the busiest rank has more than this multiple of the least possible.

    Raises:
        ValueError: the module has no experts whose tokens travel.
        DTensorError: an optimizer keeps state of all parameters in one, as LBFGS does, which stacked experts that
            change positions would mix up.

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
        self._groups = dict(groups_of(module))
        if not self._groups:
            raise ValueError(
                f"module = {type(module).__name__} has no experts whose tokens travel; parallelize it with "
                'parallelize_module(module, mesh, [..., expert_parallel("ep")])'
            )
        self.reset()
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS) and any(isinstance(g, Stacked) for g in self._groups.values()):
                raise DTensorError(
                    "LBFGS keeps its history of all parameters in one tensor, where stacked experts that change "
                    "positions would be mixed up; use another optimizer with ExpertsAllocator"
                )
            optimizer.register_state_dict_pre_hook(self._refuse)
            optimizer.register_load_state_dict_pre_hook(self._refuse_loading)

    def loads(self) -> dict[str, list[int]]:
        """Choices of each expert since the last move or `reset`, by module. Every rank must call it."""
        return {name: _summed(group.counts) for name, group in self._groups.items()}

    def reset(self) -> None:
        """Forget what was counted."""
        for group in self._groups.values():
            group.counts.load = {}

    def plan(self) -> dict[str, Move]:
        """What `step` would do now, for the modules where it would do something. Every rank must call it."""
        return {n: move for n, loads in self.loads().items() if (move := self._move(n, loads)) is not None}

    def step(self) -> dict[str, Move]:
        """Move experts where that pays, and start counting anew; call it between two training steps, on every rank."""
        moves = self.plan()
        for name, move in moves.items():
            self._groups[name].place(move.order, self.optimizers)
        self.reset()
        return moves

    def restore(self) -> None:
        """Bring every expert back to where the model's code and the plan have it. Every rank must call it."""
        for group in self._groups.values():
            first = list(range(group.counts.num_experts))
            if group.order() != first:
                group.place(first, self.optimizers)

    def _move(self, name: str, loads: list[int]) -> Move | None:
        group = self._groups[name]
        held, order = group.held(), group.order()
        owner = [0] * len(order)
        for rank, positions in enumerate(held):
            for position in positions:
                owner[order[position]] = rank
        new = balance(loads, owner, len(held), tolerance=self.tolerance)
        moved = sum(a != b for a, b in zip(owner, new, strict=True))
        if not moved:
            return None
        before, after = (max(rank_loads(loads, o, len(held))) for o in (owner, new))
        return Move(tuple(settle(order, held, new)), moved, before, after, lower_bound(loads, len(held)))

    # ---------------------------------------------------------------- states that would be taken for ordered ones

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        if any(group.misleads() for group in self._groups.values()):
            raise DTensorError(
                f"{type(optimizer).__name__}: experts are not where the model's code has them, so its state would fit "
                "no other run; call ExpertsAllocator.restore() on every rank first"
            )

    def _refuse_loading(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        self._refuse(optimizer)


def _summed(counts: Counts) -> list[int]:
    """Choices by expert, over all ranks that had different tokens."""
    total = torch.zeros(counts.num_experts, dtype=torch.int64)
    for (mesh, axes), load in (counts.load or {}).items():
        counted = load.clone()
        if mesh.size_of(axes) > 1:
            dist.all_reduce(counted, group=mesh.group(axes))
        total += counted.cpu()
    return [int(n) for n in total.tolist()]
