"""The result of a split: stages, what flows between them, and how to put the model's own output together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import SplitError
from .tree import fill

__all__ = ["Crossing", "Port", "Stage", "StageGraph", "Unit"]


@dataclass(frozen=True, slots=True)
class Port:
    """Where an input of a stage comes from."""

    source: str
    """`batch` or `stage`."""
    key: int | str
    """Of the batch: position or name of the argument. Of a stage: its number."""
    index: int
    """Of the batch: leaf of the argument in the order of torch's pytree. Of a stage: number of its output."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    index: int
    """Its number, from 0 at the inputs."""
    module: nn.Module
    """Called with one value per input, in order; returns a tuple of one value per output."""
    inputs: tuple[Port, ...]
    """Where its inputs come from."""
    num_outputs: int
    """How many values it returns; -1 for the last stage of a manual graph, whose output is known when it has run."""
    output_needs_grad: tuple[bool, ...]
    """Per output whether a gradient comes back for it when the model trains."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage sends to another."""

    producer: int
    """Stage that makes it."""
    consumer: int
    """Stage that uses it."""
    text: str
    """What it is."""
    shape: tuple[int, ...]
    """Its shape for the example inputs."""
    dtype: torch.dtype
    """Its type."""
    bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is called as a whole."""

    name: str
    """Its name in the model."""
    stage: int
    """The stage of its first call."""
    cost: float
    """What it counts in the balance: estimated FLOPs, parameters, or what was given. 0 where nothing was balanced."""
    parameter_bytes: int
    """Size of its parameters."""


@dataclass(frozen=True, eq=False)
class StageGraph:
    """Stages and what flows between them.

    Stages share the model's own module objects, so parameters, hooks and modes are those of the model.
    """

    stages: tuple[Stage, ...]
    """In the order of the forward."""
    edges: tuple[tuple[int, int], ...]
    """(producer, consumer) of stages, sorted."""
    tied: tuple[tuple[tuple[int, str], ...], ...] = ()
    """Per parameter that several stages use: (stage, its name there); one object in one process."""
    crossings: tuple[Crossing, ...] = ()
    """Every value that is sent."""
    units: tuple[Unit, ...] = ()
    """Modules called as a whole, in the order of their first calls."""
    training: bool | None = None
    """The only mode of the model in which this graph holds, or None for both."""
    template: Any = None
    """Output of the model with `Slot`s for tensors, or a function that returns it."""
    accepts: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None
    """Whether arguments fit: shapes, types, and what Python code read of them."""
    again: Callable[[tuple[Any, ...], dict[str, Any]], StageGraph] | None = None
    """Split once more for other arguments."""
    model: nn.Module | None = field(default=None, repr=False)
    """The model."""
    _others: list[StageGraph] = field(default_factory=list, repr=False)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def unflatten_outputs(self, outputs: Sequence[Any]) -> Any:
        """Return the model's own output.

        Args:
            outputs: what the last stage returned: the tensors of the output in order. What is no tensor in it (None,
                numbers) is known already.
        """
        template = self.template() if callable(self.template) else self.template
        return fill(template, list(outputs))

    def batch_value(self, port: Port, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the value of the batch that a port names.

        Raises:
            SplitError: the arguments lack it.
        """
        try:
            given = args[port.key] if isinstance(port.key, int) else kwargs[port.key]
        except (IndexError, KeyError):
            name = f"argument {port.key}" if isinstance(port.key, int) else f"keyword argument {port.key!r}"
            raise SplitError(f"a stage takes {name}, which the call does not give.") from None
        return pytree.tree_leaves(given)[port.index]

    def matches(self, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Return whether the graph holds for these arguments (and the model's present mode).

        Shapes, types and all that is no tensor must be those of the example, and what Python code between modules read
        of the inputs (such as whether a mask is all ones) must be the same.
        """
        if self.training is not None and self.model is not None and self.model.training != self.training:
            return False
        return self.accepts is None or self.accepts(tuple(args), dict(kwargs or {}))

    def for_batch(self, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> StageGraph:
        """Return a graph with the same cuts that holds for these arguments: this one, one made before, or a new one.

        Raises:
            SplitError: the model can't be recorded with them.
        """
        for graph in (self, *self._others):
            if graph.matches(args, kwargs):
                return graph
        if self.again is None:
            raise SplitError("this graph was made by hand and can't be made again for other arguments.")
        made = self.again(tuple(args), dict(kwargs or {}))
        self._others.append(made)
        return made

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages one after another in this process, and return the model's own output.

        Example:
            >>> from vescale_pipe import split
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
            >>> batch = torch.ones(4, 2)
            >>> graph = split(model, at=["2"], example_args=(batch,))
            >>> torch.equal(graph.run(batch), model(batch))
            True
        """
        graph = self.for_batch(args, kwargs)
        made: list[Sequence[Any]] = []
        for stage in graph.stages:
            values = [
                graph.batch_value(port, args, kwargs) if port.source == "batch" else made[int(port.key)][port.index]
                for port in stage.inputs
            ]
            made.append(stage.module(*values))
        return graph.unflatten_outputs(made[-1])

    def release(self, keep: Sequence[int]) -> None:
        """Move the weights of all stages but some to meta, which frees their memory on this rank.

        Args:
            keep: stages whose weights stay. The model as a whole can't run afterwards; it can be split again.
        """
        kept = {id(tensor) for index in keep for tensor in _tensors(self.stages[index].module)}
        made: dict[int, Tensor] = {}
        roots = [stage.module for stage in self.stages] + ([self.model] if self.model is not None else [])
        for root in roots:
            for module in root.modules():
                tables: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is None or id(tensor) in kept or tensor.is_meta:
                            continue
                        if id(tensor) not in made:
                            twin: Tensor = torch.empty_like(tensor.detach(), device="meta")
                            if isinstance(tensor, nn.Parameter):
                                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                            made[id(tensor)] = twin
                        table[name] = made[id(tensor)]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
