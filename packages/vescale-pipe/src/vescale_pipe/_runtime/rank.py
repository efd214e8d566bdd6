"""One rank of a pipeline: its stages, its ends of edges, and the running of its calls.

What to do is worked out once per schedule (`calls.py`); a step goes through a flat list of bound calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._schedule import Kind
from .._transport import Receiving, Sending, Transport
from ..errors import PipeError, TransportError
from .batch import Batch
from .losses import LossRule, own_loss
from .stage import Edge, StageRunner
from .tied import TiedRank, tied_groups
from .wiring import GraphLike, Wiring

__all__ = ["Call", "Calls", "Rank", "Record", "run_together"]

Record = Callable[[Kind, int, int, int, int], None]
"""Gets kind, stage, micro-batch, start and end (`time.perf_counter_ns`) of each computation."""


@dataclass(frozen=True, slots=True)
class Call:
    """One entry of the list."""

    run: Callable[[], None]
    """Does it."""
    name: str
    """For errors."""
    ready: Callable[[], bool] | None = None
    """Whether it would not wait; None if it never waits."""
    kind: Kind | None = None
    """What is computed; None for messages."""
    stage: int = -1
    """Of a computation."""
    microbatch: int = -1
    """Of a computation."""


@dataclass(frozen=True, slots=True)
class Calls:
    """All that a rank does in a step."""

    calls: tuple[Call, ...]
    """In order."""
    receives: tuple[tuple[int, int], ...]
    """(rank, tag) of messages on edges, in the order in which they are taken."""
    label: Callable[[int], str]
    """Says what the message of a tag is."""
    training: bool
    """Whether there are backwards."""


class Rank:
    """A rank.

    Args:
        graph: the model in stages.
        wiring: its messages; those of each step, `begin` is told.
        placement: rank of each stage.
        rank: this one.
        transport: its channels.
        losses: how losses are made and weighted.
        tied: how gradients of tied parameters are added: "exact", "fast", or "none", where all stages have one object
            and autograd adds them.
        added: whether stages may add losses.
        seeded: whether each micro-batch has a stream of random numbers of its own.
        ahead: messages that are asked for before they are needed.
    """

    def __init__(
        self,
        graph: GraphLike,
        wiring: Wiring,
        placement: Sequence[int],
        rank: int,
        transport: Transport,
        losses: LossRule,
        *,
        tied: str = "exact",
        ahead: int = 2,
        added: bool = False,
        seeded: bool = False,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.wiring = wiring
        self.losses = losses
        self.ahead = ahead
        self.added = added
        self.placement = tuple(placement)
        self.last = len(self.placement) - 1
        self.has_last = self.placement[self.last] == rank
        self.edges: dict[tuple[int, int], Edge] = {
            edge: Edge(
                self.placement[edge[0]] == self.placement[edge[1]],
                edge in wiring.grad_edges,
                seeded and edge[1] == edge[0] + 1,
            )
            for edge in wiring.edges
            if rank in (self.placement[edge[0]], self.placement[edge[1]])
        }
        self.stages: dict[int, StageRunner] = {}
        for number, owner in enumerate(self.placement):
            if owner != rank:
                continue
            ends = wiring.stages[number]
            self.stages[number] = StageRunner(
                number,
                graph.stages[number].module,
                ends,
                [self.edges[before, number] for before, _ in ends.incoming],
                [self.edges[number, after] for after, _ in ends.outgoing],
                self._last if number == self.last else None,
            )
            if added:
                self.stages[number].seed = self._added_seed
        self.groups = tied_groups(graph, self.placement)
        self.tied = [
            TiedRank(
                group,
                {
                    place: graph.stages[stage].module.get_parameter(name)
                    for place, (stage, name) in enumerate(group.members)
                    if stage in self.stages
                },
                self.stages,
                transport,
                tied == "exact",
            )
            for group in self.groups
            if rank in group.ranks and tied != "none"
        ]
        self.expected: deque[Receiving] = deque()
        self.sending: dict[tuple[int, int], Sending] = {}
        self._graphs: Sequence[GraphLike] = ()
        self._calls: Calls | None = None
        self._posted = 0
        self.at = 0
        """Place in the list of calls."""
        self.loss: Tensor | None = None
        """Of the step."""
        self.own_loss: Tensor | None = None
        """Of the step, without losses that stages added."""
        self.loss_places: set[int | None] = set()
        """Which output the loss of a micro-batch is, for each; None: it is none of them."""
        self.results: list[list[Any]] = []
        """Per micro-batch the outputs of the last stage, on its rank."""
        self.added_values: list[dict[int, dict[int, list[Tensor]]]] = []
        """Losses that stages added: of each rank, per stage and micro-batch."""
        self._parts: dict[int, Tensor] = {}
        self._weights: list[float] = []
        self._targets: list[Any] = []
        self._scale = 1.0
        self._keep = True
        self._with_loss = True

    # -- a step

    def begin(
        self,
        calls: Calls,
        batch: Batch,
        graphs: Sequence[GraphLike],
        wirings: Sequence[Wiring],
        modules: Callable[[GraphLike, int], Callable[..., Any]],
        target: Any,
        *,
        keep: bool = True,
        loss: bool = True,
        scale: float = 1.0,
        seeds: Sequence[int] | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            calls: what to do.
            batch: what the step was called with.
            graphs: the model in stages, per micro-batch.
            wirings: its messages, per micro-batch; all on the edges of this rank.
            modules: returns the module of a stage, as wrapped by plugins.
            target: second argument of the loss.
            keep: whether outputs of the last stage are kept.
            loss: whether there is a loss.
            scale: of all gradients.
            seeds: of random numbers, per micro-batch.
        """
        self.at = -1
        self._calls = calls
        self._graphs = graphs
        self.transport.label = calls.label
        self._keep, self._with_loss, self._scale = keep, loss, scale
        self.loss = self.own_loss = None
        self.loss_places.clear()
        self.results = [[] for _ in range(batch.count)]
        self.added_values.clear()
        self._parts = {}
        self._weights, self._targets = [], [None] * batch.count
        if loss and self.has_last:
            self.losses.check(target is not None)
        if loss and (self.has_last or self.added):
            if target is not None:
                self._targets = batch.targets()
            self._weights = self.losses.weights(batch, self._targets)
        for number, stage in self.stages.items():
            stage.ends = [stage.ends_of(one.stages[number]) for one in wirings]
            stage.batch = _rows(number, wirings, batch)
            stage.seeds = seeds
            stage.modules = [modules(graph, number) for graph in graphs]
        # As on one device, backwards run outside of the user's autocast.
        autocast = tuple(device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
        for stage in self.stages.values():
            stage.autocast = autocast
        if calls.training:
            for group in self.tied:
                group.begin()
        self.at = 0
        self._posted = 0
        for _ in range(self.ahead):
            self.post()

    def post(self) -> None:
        """Ask for the next message on an edge."""
        assert self._calls is not None
        receives = self._calls.receives
        if self._posted < len(receives):
            self.expected.append(self.transport.recv(*receives[self._posted]))
            self._posted += 1

    def run(self, record: Record | None = None) -> None:
        """Do all calls from where the rank is to the end.

        Args:
            record: told about each computation.
        """
        assert self._calls is not None
        if record is None:
            for self.at, call in enumerate(self._calls.calls):  # noqa: B020
                call.run()
            return
        clock = time.perf_counter_ns
        for self.at, call in enumerate(self._calls.calls):  # noqa: B020
            start = clock()
            call.run()
            if call.kind is not None:
                record(call.kind, call.stage, call.microbatch, start, clock())

    def advance(self, record: Record | None = None) -> bool:
        """Do calls as long as none waits; returns whether any was done.

        Args:
            record: told about each computation.

        Raises:
            PipeError: as the calls do.
        """
        assert self._calls is not None
        calls = self._calls.calls
        start = self.at
        while self.at < len(calls):
            call = calls[self.at]
            if call.ready is not None and not call.ready():
                break
            begun = time.perf_counter_ns()
            call.run()
            if record is not None and call.kind is not None:
                record(call.kind, call.stage, call.microbatch, begun, time.perf_counter_ns())
            self.at += 1
        return self.at > start

    def where(self) -> str:
        """Say what the rank is at."""
        if self._calls is None or self.at < 0:  # an error came before the first call
            return "the start of a step"
        if self.at < len(self._calls.calls):
            return self._calls.calls[self.at].name
        return "the end"

    def done(self) -> bool:
        """Return whether all calls are done."""
        assert self._calls is not None
        return self.at >= len(self._calls.calls)

    def forget(self) -> None:
        """Drop all that a step kept."""
        self.expected.clear()
        self.sending.clear()
        for stage in self.stages.values():
            stage.forget()
            stage.batch, stage.modules, stage.ends = [], (), ()

    def drain(self) -> None:
        """Wait until all messages have left."""
        for one in self.sending.values():
            one.wait()
        self.sending.clear()

    def send_now(self, dst: int, tag: int, value: Callable[[], Any]) -> None:
        """Send one value."""
        self.sending[dst, tag] = self.transport.send(dst, tag, [value()])

    # -- losses

    def _last(self, outputs: Sequence[Any], microbatch: int) -> tuple[Tensor, Tensor] | None:
        """Make the loss of a micro-batch; see `StageRunner`."""
        if self._keep:
            self.results[microbatch] = [one.detach() if isinstance(one, Tensor) else one for one in outputs]
        if not self._with_loss:
            return None
        result = self._graphs[microbatch].unflatten_outputs(list(outputs))
        if not torch.is_grad_enabled() and self.losses.function is None and own_loss(result) is None:
            return None
        loss = self.losses.value(result, self._targets[microbatch])
        self.loss_places.add(next((place for place, one in enumerate(outputs) if one is loss), None))
        self._parts[microbatch] = loss.detach()
        if not loss.requires_grad:
            return None
        return loss, self.losses.seed(loss, self._weights[microbatch], self._scale)

    def _added_seed(self, loss: Tensor, microbatch: int) -> Tensor:
        return self.losses.seed(loss, self._weights[microbatch], self._scale)

    def added_here(self) -> dict[int, dict[int, list[Tensor]]]:
        """Return losses that this rank's stages added."""
        return {number: dict(stage.added) for number, stage in self.stages.items() if stage.added}

    def total(self) -> None:
        """On the rank of the last stage: make the loss of the step."""
        added: dict[int, dict[int, list[Tensor]]] = {}
        for one in (*self.added_values, self.added_here()):
            added.update(one)
        total: Tensor | None = None
        own: Tensor | None = None
        for microbatch in range(len(self._parts)):
            part, weight = self._parts[microbatch], self._weights[microbatch]
            if added:
                own = part * weight if own is None else own + part * weight
            for stage in sorted(added):
                for more in added[stage].get(microbatch, ()):
                    part = part + more
            part = part * weight
            total = part if total is None else total + part
        self.loss = total
        self.own_loss = own if added else total

    def get_loss(self) -> Tensor | None:
        """Return the loss of the step."""
        return self.loss

    def set_loss(self, message: list[Any]) -> None:
        """Take the loss of the step from the rank that made it."""
        self.loss = message[0]


def _rows(number: int, wirings: Sequence[Wiring], batch: Batch) -> list[tuple[Any, ...]]:
    """Return per micro-batch the values of the batch that a stage takes."""
    made: dict[int, list[tuple[Any, ...]]] = {}
    for wiring in wirings:
        if id(wiring) in made:
            continue
        columns = []
        for port in wiring.stages[number].args:
            if isinstance(port, int):
                continue
            leaves = batch.columns(port.key)
            if not 0 <= port.index < len(leaves):
                raise PipeError(
                    f"stage {number} takes leaf {port.index} of argument {port.key!r}, which has {len(leaves)} now; "
                    "give arguments of the structure with which the model was split."
                )
            columns.append(leaves[port.index])
        made[id(wiring)] = list(zip(*columns, strict=True)) if columns else [()] * batch.count
    return [made[id(wiring)][microbatch] for microbatch, wiring in enumerate(wirings)]


def run_together(ranks: Sequence[Rank], record: Record | None = None) -> None:
    """Run all ranks of a pipeline in this thread: each goes on until it waits.

    Args:
        ranks: all of them, each begun.
        record: told about each computation.

    Raises:
        TransportError: all wait.
    """
    todo = list(ranks)
    while todo:
        moved = False
        for one in todo:
            moved |= one.advance(record)
        todo = [one for one in todo if not one.done()]
        if todo and not moved:
            stuck = "; ".join(f"rank {one.rank} at {one.where()}" for one in todo)
            raise TransportError(f"no rank can go on: {stuck}.")
