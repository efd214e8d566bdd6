"""Which values go between which stages, and in which order their gradients are added.

A value that several stages take goes from its producer to the first of them, from there to the second, and so on;
its gradient comes back the same way, and each stage adds its own part. That is the order in which autograd adds the
parts on one device, latest use first, so the sums are bitwise the same, and messages ride with those of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ..errors import PipeError

__all__ = ["GraphLike", "PortLike", "StageLike", "StageWiring", "Wiring", "together", "wire"]


class PortLike(Protocol):
    """Where an input of a stage comes from."""

    @property
    def source(self) -> str:
        """Either "batch" or "stage"."""

    @property
    def key(self) -> int | str:
        """Position or keyword of an argument; or number of a stage."""

    @property
    def index(self) -> int:
        """Leaf of the argument; or output of the stage."""


class StageLike(Protocol):
    """A piece of a model."""

    @property
    def index(self) -> int:
        """Its number."""

    @property
    def module(self) -> nn.Module:
        """Takes one value per input, returns a tuple of one value per output."""

    @property
    def inputs(self) -> Sequence[Any]:
        """A port each."""

    @property
    def num_outputs(self) -> int:
        """Values that it returns."""

    @property
    def output_needs_grad(self) -> Sequence[bool]:
        """Per output whether a gradient may come back for it."""


class GraphLike(Protocol):
    """A model in stages."""

    @property
    def stages(self) -> Sequence[Any]:
        """In the order in which one device runs them."""

    @property
    def tied(self) -> Sequence[Sequence[tuple[int, str]]]:
        """Groups of (stage, parameter) that are one parameter."""

    def unflatten_outputs(self, outputs: list[Any]) -> Any:
        """Return the model's own result from the outputs of the last stage."""


Value = tuple[int, int]
"""Producing stage and number of the output."""


@dataclass(frozen=True, slots=True)
class StageWiring:
    """Ends at one stage."""

    incoming: tuple[tuple[int, tuple[Value, ...]], ...]
    """Per stage before it, from the lowest number on, the values that come from there."""
    outgoing: tuple[tuple[int, tuple[int, ...]], ...]
    """Per stage after it, from the highest number on, the values that go there: the number of an output, or
    -1 - the place of a value that came in and is passed on."""
    args: tuple[int | PortLike, ...]
    """Per input the place of a value that came in, or a port of the batch."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Ends at all stages."""

    stages: tuple[StageWiring, ...]
    """By number."""
    edges: tuple[tuple[int, int], ...]
    """(from, to) of all messages with values."""
    grad_edges: tuple[tuple[int, int], ...]
    """Those of them on which gradients come back."""
    relayed: bool
    """Whether values are passed on, or each goes to every stage that takes it directly."""


def wire(graph: GraphLike, *, relay: bool = True) -> Wiring:
    """Work out the messages of a model in stages.

    Args:
        graph: the model.
        relay: pass values on from stage to stage; else gradients of a value are added where it was made.

    Raises:
        PipeError: a stage takes what is not there yet.
    """
    takers: dict[Value, list[int]] = {}
    stages = list(graph.stages)
    for number, stage in enumerate(stages):
        if stage.index != number:
            raise PipeError(f"stage {stage.index} is at place {number}; stages must be in the order of their numbers.")
        for port in stage.inputs:
            if port.source == "batch":
                continue
            if not (isinstance(port.key, int) and 0 <= port.key < number):
                raise PipeError(f"stage {number} takes a value of stage {port.key}, which must be one before it.")
            if not 0 <= port.index < stages[port.key].num_outputs:
                count = stages[port.key].num_outputs
                raise PipeError(f"stage {number} takes output {port.index} of stage {port.key}, which has {count}.")
            found = takers.setdefault((port.key, port.index), [])
            if not found or found[-1] != number:
                found.append(number)
    carried: dict[tuple[int, int], list[Value]] = {}
    for value, users in sorted(takers.items()):
        before = value[0]
        for user in users:
            carried.setdefault((before, user), []).append(value)
            if relay:
                before = user
    edges = tuple(sorted(carried))
    grad_edges = tuple(
        edge for edge in edges if any(stages[made].output_needs_grad[output] for made, output in carried[edge])
    )
    return Wiring(
        tuple(_stage(stage, carried) for stage in stages), edges, grad_edges, relay and len(takers) < _uses(takers)
    )


def _uses(takers: dict[Value, list[int]]) -> int:
    return sum(map(len, takers.values()))


def _stage(stage: StageLike, carried: dict[tuple[int, int], list[Value]]) -> StageWiring:
    number = stage.index
    incoming = tuple((edge[0], tuple(values)) for edge, values in sorted(carried.items()) if edge[1] == number)
    places: dict[Value, int] = {}
    for _, values in incoming:
        for value in values:
            places[value] = len(places)
    outgoing = tuple(
        (edge[1], tuple(output if made == number else -1 - places[made, output] for made, output in values))
        for edge, values in sorted(carried.items(), reverse=True)
        if edge[0] == number
    )
    args = tuple(port if port.source == "batch" else places[port.key, port.index] for port in stage.inputs)
    return StageWiring(incoming, outgoing, args)


def together(wirings: Sequence[Wiring], *, chained: bool = False) -> list[Wiring]:
    """Give graphs of one step the same messages: where a graph has none on an edge of another one, an empty one.

    Args:
        wirings: of models in as many stages each.
        chained: whether there is a message from each stage to the next.
    """
    count = len(wirings[0].stages)
    chain = {(stage, stage + 1) for stage in range(count - 1)} if chained else set()
    edges = tuple(sorted(chain.union(*(one.edges for one in wirings))))
    grad_edges = tuple(sorted(set().union(*(one.grad_edges for one in wirings))))
    return [
        one if (one.edges, one.grad_edges) == (edges, grad_edges) else _padded(one, edges, grad_edges)
        for one in wirings
    ]


def _padded(wiring: Wiring, edges: tuple[tuple[int, int], ...], grad_edges: tuple[tuple[int, int], ...]) -> Wiring:
    stages = []
    for number, ends in enumerate(wiring.stages):
        incoming, outgoing = dict(ends.incoming), dict(ends.outgoing)
        stages.append(
            StageWiring(
                tuple((before, incoming.get(before, ())) for before, after in edges if after == number),
                tuple((after, outgoing.get(after, ())) for before, after in reversed(edges) if before == number),
                ends.args,
            )
        )
    return Wiring(tuple(stages), edges, grad_edges, wiring.relayed)
