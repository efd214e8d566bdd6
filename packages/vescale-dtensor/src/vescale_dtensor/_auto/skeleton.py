"""The skeleton of a model: a copy on the meta device in which repeated layers stand once.

Layers are repeated where a container holds modules of the same structure one after the other (class, names,
shapes and types of parameters, children). What one of them sends and holds counts as often as it stood there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._tensor import DTensor
from ..errors import PlanError


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of one structure that follow each other in a container."""

    container: str
    """Name of the module that holds them."""
    indices: tuple[str, ...]
    """Their names in the container."""
    all_of: tuple[str, ...]
    """Names of all children of the container."""

    @property
    def names(self) -> list[str]:
        """Full names of the layers."""
        return [_join(self.container, i) for i in self.indices]

    @property
    def kept(self) -> str:
        """Full name of the one that stands for all."""
        return _join(self.container, self.indices[0])

    @property
    def pattern(self) -> str:
        """Regular expression for their names in the container."""
        if self.indices == self.all_of:
            return r"\d+" if all(i.isdigit() for i in self.indices) else f"({'|'.join(map(re.escape, self.indices))})"
        return f"({'|'.join(map(re.escape, self.indices))})"


@dataclass(slots=True)
class Skeleton:
    """A model without data, each kind of layer once."""

    module: nn.Module
    """The copy."""
    runs: list[Run] = field(default_factory=list)
    """What was left out."""

    def weights(self) -> dict[str, int]:
        """How many layers the modules stand for, by name of those that stand for more than themselves."""
        return {run.kept: len(run.indices) for run in self.runs}

    def weight_of(self, name: str) -> int:
        """How many modules or parameters of the model the one of this name stands for."""
        found = next((r for r in self.runs if name == r.kept or name.startswith(r.kept + ".")), None)
        return len(found.indices) if found else 1

    def pattern(self, name: str) -> str:
        """Regular expression for the names in the model that `name` stands for."""
        for run in self.runs:
            if name == run.kept or name.startswith(run.kept + "."):
                head = re.escape(run.container) + r"\." if run.container else ""
                return head + run.pattern + re.escape(name[len(run.kept) :])
        return re.escape(name)


def skeleton(module: nn.Module, *, kept: int | None = 1, apart: Container[str] = ()) -> Skeleton:
    """Copy a module to the meta device, and leave out repeated layers.

    Args:
        module: the model.
        kept: how many layers of a run stay; None leaves nothing out.
        apart: names of layers that stand for themselves only.

    Raises:
        PlanError: a parameter is distributed already or has no shape yet.
    """
    copied = _on_meta(module)
    if kept is None:
        return Skeleton(copied)
    runs = list(_runs(copied, apart))
    for run in runs:
        children = copied.get_submodule(run.container)._modules
        for index in run.indices[kept:]:
            del children[index]
    return Skeleton(copied, runs)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _on_meta(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(t, DTensor):
            raise PlanError(f"{name!r} is a DTensor already; make the plan before the module is parallelized")
        if nn.parameter.is_lazy(t):
            raise PlanError(f"{name!r} has no shape yet; run a lazy module once before planning")
        memo[id(t)] = _ghost(t)
    for owner in module.modules():
        for value in owner.__dict__.values():  # plain tensors that a module holds beside its buffers
            if isinstance(value, Tensor):
                memo.setdefault(id(value), _ghost(value))
    return copy.deepcopy(module, memo)


def _ghost(t: Tensor) -> Tensor:
    """A tensor of the same kind without data."""
    made = torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made


def _runs(root: nn.Module, apart: Container[str]) -> Iterator[Run]:
    """The outermost runs of repeated layers."""
    known: dict[int, Any] = {}
    inside: list[str] = []
    for name, module in root.named_modules():
        if any(name == i or name.startswith(i + ".") for i in inside):
            continue
        children = list(module._modules.items())
        start = 0
        while start < len(children):
            first = children[start][1]
            stop = start + 1
            if _join(name, children[start][0]) not in apart:
                held = _parameters(first)
                while stop < len(children) and structure(children[stop][1], known) == structure(first, known):
                    more = _parameters(children[stop][1])
                    if not held.isdisjoint(more):  # one layer that is called several times sends and holds once
                        break
                    held |= more
                    stop += 1
            if stop - start > 1 and is_layer(first):
                yield Run(name, tuple(k for k, _ in children[start:stop]), tuple(k for k, _ in children))
                inside += [_join(name, k) for k, _ in children[start:stop]]
            start = stop


def _parameters(module: nn.Module | None) -> set[int]:
    return set() if module is None else {id(p) for p in module.parameters()}


def is_layer(module: nn.Module | None) -> bool:
    """Whether a module is large enough to be planned as one; smaller ones may take turns: one by column, one by row."""
    return module is not None and sum(p.ndim > 1 for p in module.parameters()) > 1


def structure(module: nn.Module | None, known: dict[int, Any]) -> Any:
    """What two modules must share to be taken for repetitions of one another."""
    if module is None:
        return None
    found = known.get(id(module))
    if found is None:
        tensors = (*module._parameters.items(), *module._buffers.items())
        found = known[id(module)] = (
            type(module),
            tuple((n, None if t is None else (t.shape, t.dtype, t.requires_grad)) for n, t in tensors),
            tuple((n, structure(m, known)) for n, m in module._modules.items()),
        )
    return found
