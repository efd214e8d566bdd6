"""One stage at work: forward and backward of its micro-batches.

Values come as leaves, one per micro-batch, so a backward ends where the stage begins, and hooks that a user puts on
an input die with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .._transport.message import PLAIN, leaf_of, tensors_of
from .._wgrad import WeightGradStore
from ..errors import PipeError
from .draws import Stream
from .losses import added_losses
from .wiring import StageWiring

__all__ = ["Edge", "Ends", "StageRunner"]

# An alias that autograd does not take for a view: in-place operations on an input of a stage work as on one device.
_alias = torch.ops.aten._unsafe_view.default
# What `torch.autograd.backward` calls after half a dozen checks that cost more than a small backward.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


class Edge:
    """One end of an edge; both ends are one object where both stages are on this rank."""

    __slots__ = ("carries", "grads", "local", "needs_grad", "values")

    def __init__(self, local: bool, needs_grad: bool, carries: bool = False) -> None:
        self.local = local
        """Whether both stages are on this rank."""
        self.carries = carries
        """Whether the last value is where the stream of random numbers of the micro-batch stands."""
        self.needs_grad = needs_grad
        """Whether gradients come back."""
        self.values: dict[int, list[Any]] = {}
        """Per micro-batch, from forward to forward."""
        self.grads: dict[int, list[Tensor | None]] = {}
        """Per micro-batch, from backward to backward; one per tensor among the values, as `tensors_of` lists them."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What goes in and out of a stage, for one kind of micro-batch."""

    counts: tuple[int, ...]
    """Values on each edge that comes in."""
    outgoing: tuple[tuple[Edge, tuple[int, ...]], ...]
    """Edges that go out, and the values on them: see `StageWiring.outgoing`."""
    args: tuple[int | None, ...]
    """Per input of the module the place of a value that came in; None: a value of the batch."""
    straight: bool
    """Whether inputs are the values that came in, in their order."""


class StageRunner:
    """Runs a stage.

    Args:
        number: of the stage.
        module: what it computes, to look into; calls go to `modules`.
        wiring: its ends, where `ends` says nothing else.
        incoming: the edges of `wiring.incoming`.
        outgoing: the edges of `wiring.outgoing`.
        last: for the last stage, what makes the loss of its outputs: a function of outputs and micro-batch that
            returns the loss and its seed, or None where there is nothing to go backward from.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        wiring: StageWiring,
        incoming: Sequence[Edge],
        outgoing: Sequence[Edge],
        last: Callable[[Sequence[Any], int], tuple[Tensor, Tensor] | None] | None,
    ) -> None:
        self.number = number
        self._module = module
        self.last = last
        self.modules: Sequence[Callable[..., Any]] = ()
        """What is computed, per micro-batch: the same weights, but glue for other shapes where those differ."""
        self.batch: list[tuple[Any, ...]] = []
        """Per micro-batch the values of the ports of the batch, in the order of the inputs."""
        self._captured: dict[str, tuple[Tensor, dict[int, Tensor | None]]] = {}
        self.seed: Callable[[Tensor, int], Tensor] | None = None
        """Makes the seed of an added loss of a micro-batch."""
        self.added: dict[int, list[Tensor]] = {}
        """Losses that the module added, per micro-batch, without graphs."""
        self.store: WeightGradStore | None = None
        """Keeps what W needs of micro-batches whose backward is in two parts; None: W has nothing to do."""
        self.autocast: tuple[str, ...] = ()
        """Devices whose autocast is on, and to be off in backwards."""
        self._incoming = tuple(incoming)
        self._outgoing = tuple(outgoing)
        self._back = any(edge.needs_grad for edge in incoming)
        self._known: dict[int, tuple[StageWiring, Ends]] = {}
        self._usual = self.ends_of(wiring)
        self.ends: Sequence[Ends] = ()
        """Per micro-batch; empty: as at the start."""
        self.seeds: Sequence[int] | None = None
        """Per micro-batch, of the random numbers that stage 0 begins with; None: generators are left alone."""
        self._saved: dict[int, tuple[list[Any], list[Any], Sequence[Any], list[Tensor], list[Tensor]]] = {}
        self._losses: list[Tensor] = []

    def ends_of(self, wiring: StageWiring) -> Ends:
        """Return the ends that a wiring of this stage means.

        Args:
            wiring: on the edges of this stage.
        """
        found = self._known.get(id(wiring))
        if found is None:
            args = tuple(one if isinstance(one, int) else None for one in wiring.args)
            counts = tuple(len(values) for _, values in wiring.incoming)
            outgoing = zip(self._outgoing, (places for _, places in wiring.outgoing), strict=True)
            ends = Ends(counts, tuple(outgoing), args, args == tuple(range(sum(counts))))
            found = self._known[id(wiring)] = (wiring, ends)
        return found[1]

    def forget(self) -> None:
        """Drop all that is kept between actions, after a failure or a step without backward."""
        self._saved.clear()
        self._losses = []
        self.added.clear()
        for edge in (*self._incoming, *self._outgoing):
            edge.values.clear()
            edge.grads.clear()
        for _, grads in self._captured.values():
            grads.clear()
        if self.store is not None:
            self.store.clear()

    def forward(self, microbatch: int) -> None:
        """Run the module, with its graph kept for `backward`.

        Args:
            microbatch: number of it.
        """
        self._keep(microbatch, *self._call(microbatch, None))

    def forward_split(self, microbatch: int) -> None:
        """Run the module so that its backward can be in two parts, `input_backward` and `weight_backward`.

        Args:
            microbatch: number of it.
        """
        recording = None if self.store is None else self.store.recording(microbatch)
        self._keep(microbatch, *self._call(microbatch, recording))

    def _keep(self, microbatch: int, came: list[Any], given: list[Any], outputs: Sequence[Any]) -> None:
        """Make the loss, and keep what the backward needs."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        if self.last is not None:
            made = self.last(outputs, microbatch)
            outputs = ()
            if made is not None:
                roots.append(made[0])
                seeds.append(made[1])
        if self._losses:
            self._take_losses(microbatch, roots, seeds)
        self._saved[microbatch] = (came, given, outputs, roots, seeds)

    def forward_only(self, microbatch: int) -> None:
        """Run the module; nothing is kept.

        Args:
            microbatch: number of it.
        """
        outputs = self._call(microbatch, None)[2]
        if self.last is not None:
            self.last(outputs, microbatch)
        if self._losses:
            self._take_losses(microbatch, [], [])

    def _call(
        self, microbatch: int, recording: AbstractContextManager[Any] | None
    ) -> tuple[list[Any], list[Any], Sequence[Any]]:
        """Return what came, the same as the module got it, and what it returned; hand on what other stages take."""
        ends = self.ends[microbatch] if self.ends else self._usual
        came: list[Any] = []
        start: Any = None
        for edge in self._incoming:
            came += edge.values.pop(microbatch)
            if edge.carries:
                start = came.pop()
        given = [
            (_alias(one, one.shape) if one.requires_grad else one) if isinstance(one, Tensor) else _guard(one)
            for one in came
        ]
        if ends.straight:
            args = given
        else:
            batch = iter(self.batch[microbatch])
            args = [next(batch) if place is None else given[place] for place in ends.args]
        module = self.modules[microbatch]
        end: Any = None
        added_losses(self._losses)
        try:
            if self.seeds is not None:
                stream = Stream(self.seeds[microbatch] if start is None else start)
                with stream, nullcontext() if recording is None else recording:
                    outputs = module(*args)
                end = stream.end
            elif recording is None:
                outputs = module(*args)
            else:
                with recording:
                    outputs = module(*args)
        finally:
            added_losses(None)
        if type(outputs) is not tuple and type(outputs) is not list:
            raise PipeError(
                f"stage {self.number}: its module returned a {type(outputs).__name__}; it must return a tuple with one "
                "value per output."
            )
        for edge, places in ends.outgoing:
            values = [outputs[place] if place >= 0 else given[-1 - place] for place in places]
            if edge.local:
                values = [leaf_of(one) for one in values]
            if edge.carries:
                values.append(end)
            edge.values[microbatch] = values
        return came, given, outputs

    def _take_losses(self, microbatch: int, roots: list[Tensor], seeds: list[Tensor]) -> None:
        losses, self._losses = self._losses, []
        if self.seed is None:
            raise PipeError(
                f"stage {self.number}: a module called add_loss; say PipePlan(added_losses=True), so that all ranks "
                "count what it adds."
            )
        self.added[microbatch] = [one.detach() for one in losses]
        for one in losses:
            if one.requires_grad:
                roots.append(one)
                seeds.append(self.seed(one, microbatch))

    def split(self) -> None:
        """Make ready for backwards in two parts."""
        if self.store is None:
            self.store = WeightGradStore(self._module)

    def backward(self, microbatch: int) -> None:
        """Add gradients of parameters, and hand gradients of inputs back.

        Args:
            microbatch: number of it.
        """
        if self._captured:
            self._apart(self._backward, microbatch)
        else:
            self._backward(microbatch)

    def input_backward(self, microbatch: int) -> None:
        """Hand gradients of inputs back; what gradients of weights need is kept for `weight_backward`.

        Args:
            microbatch: number of it.
        """
        if self.store is None:
            self.backward(microbatch)
            return
        with self.store.backward(microbatch):
            self.backward(microbatch)

    def weight_backward(self, microbatch: int) -> None:
        """Add the gradients of weights that `input_backward` left.

        Args:
            microbatch: number of it.
        """
        store = self.store
        if store is None:
            return
        with self._no_autocast():
            if self._captured:
                self._apart(store.run, microbatch)
            else:
                store.run(microbatch)

    def _backward(self, microbatch: int) -> None:
        came, given, outputs, roots, seeds = self._saved.pop(microbatch)
        shared: dict[int, int] | None = None
        ends = self.ends[microbatch] if self.ends else self._usual
        for edge, places in ends.outgoing:
            if not edge.needs_grad:
                continue
            sent = tensors_of([outputs[place] if place >= 0 else given[-1 - place] for place in places])
            for value, grad in zip(sent, edge.grads.pop(microbatch), strict=True):
                if grad is None or value is None:
                    continue
                if shared is None:
                    shared = {}
                if id(value) in shared:
                    # Several stages took it from here; the latest one comes first.
                    seeds[shared[id(value)]] = seeds[shared[id(value)]] + grad
                else:
                    shared[id(value)] = len(roots)
                    roots.append(value)
                    seeds.append(grad)
        if roots:
            if self.autocast:
                with self._no_autocast():
                    _run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)
            else:
                _run_backward(tuple(roots), tuple(seeds), False, False, (), True, True)
        del roots, seeds, outputs, given
        if self._back:
            self._hand_back(microbatch, came, ends)

    def _hand_back(self, microbatch: int, came: list[Any], ends: Ends) -> None:
        start = 0
        for edge, count in zip(self._incoming, ends.counts, strict=True):
            if edge.needs_grad:
                edge.grads[microbatch] = [
                    None if leaf is None else leaf.grad for leaf in tensors_of(came[start : start + count])
                ]
            start += count

    def _no_autocast(self) -> ExitStack:
        off = ExitStack()
        for device in self.autocast:
            off.enter_context(torch.autocast(device, enabled=False))
        return off

    def capture(self, name: str, param: Tensor) -> dict[int, Tensor | None]:
        """Keep gradients of a parameter apart per micro-batch, instead of adding them up.

        Args:
            name: of the parameter.
            param: the parameter.

        Returns:
            Where they are found, per micro-batch, when its backward is over.
        """
        return self._captured.setdefault(name, (param, {}))[1]

    def _apart(self, run: Callable[[int], None], microbatch: int) -> None:
        """Run a backward with gradients of captured parameters kept apart."""
        held = []
        for param, grads in self._captured.values():
            held.append(param.grad)
            param.grad = grads.pop(microbatch, None)
        try:
            run(microbatch)
        finally:
            for (param, grads), grad in zip(self._captured.values(), held, strict=True):
                grads[microbatch] = param.grad
                param.grad = grad


def _guard(value: Any) -> Any:
    """Return a value whose tensors that require a gradient are aliases, see `_alias`."""
    if type(value) in PLAIN:
        return value
    return _pytree.tree_map_only(Tensor, lambda one: _alias(one, one.shape) if one.requires_grad else one, value)
