"""Rehearsals: one training step of a skeleton under a plan, on meta tensors, with every collective counted.

The step runs through the same rules and moves as a real one, so what it counts is what `explain()` would see on
the rank that holds the largest shards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._comm.move import forget_casts
from .._modules.forward import InputHook, OutputHook, children, rebuilt
from .._modules.plan import Path, Request, Requests, merged
from .._spec import Spec, spec_of
from .._tensor import DTensor, make
from ..errors import PlanError
from ..placements import I, Placement, to_axis_types, to_placement
from .cost import Cost, Machine
from .mesh import RehearsalMesh
from .meter import Meter, Most, TooMuch
from .skeleton import Skeleton
from .stage import on_stage


@dataclass(frozen=True, slots=True)
class Key:
    """What a choice is about."""

    section: str
    """`parameter`, `input` or `output`."""
    name: str
    """Of the parameter or module, in the skeleton."""
    path: Path = ()
    """Of the value inside the input or output."""


_ANY = re.compile("")
_ANYTHING = Most()

Choices = Mapping[Key, tuple[int | None, ...]]
"""One axis type per mesh axis, None for as it is."""


@dataclass(slots=True)
class Example:
    """Arguments of a call."""

    args: tuple[Any, ...]
    """By position."""
    kwargs: dict[str, Any]
    """By name."""

    def on_meta(self, mesh: RehearsalMesh | None) -> Example:
        """The arguments without data; DTensors keep their placements where there is a mesh, else they are whole."""

        def ghost(value: Any) -> Any:
            if isinstance(value, DTensor) and mesh is not None:
                spec = spec_of(mesh, value._spec.shape, value._spec.types)
                return make(mesh.empty(spec.local_shape, value.dtype), spec)
            if isinstance(value, Tensor):
                made = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
                return made.requires_grad_(value.requires_grad)
            return value

        args, kwargs = _mapped(ghost, (self.args, self.kwargs))
        return Example(args, kwargs)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with its leaves replaced; containers are those that a plan can address."""
    items = children(value)
    return rebuilt(value, {k: _mapped(function, v) for k, v in items}) if items else function(value)


def loss_of(output: Any) -> Tensor | None:
    """What to differentiate: the scalars of the output, else a loss of all that has a gradient; None without any.

    The loss is a sum of squares: unlike a sum, it needs the values themselves, not parts of them that add up.
    """
    found: list[Tensor] = []
    pending = [output]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.requires_grad:
                found.append(value)
        else:
            pending += [v for _, v in children(value)]
    scalars = [t for t in found if t.ndim == 0]
    sums = scalars or [t.square().sum() for t in found]
    return sum(sums[1:], sums[0]) if sums else None


class Rehearsal:
    """Runs a skeleton under choices. The skeleton's parameters become DTensors.

    Args:
        skeleton: the model.
        mesh: what it is planned for.
        example: arguments of one call.
        machine: for the seconds of collectives.
        answers: to what the model asks of its data.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        mesh: RehearsalMesh,
        example: Example,
        machine: Machine,
        answers: Sequence[bool] = (),
    ) -> None:
        self.skeleton, self.mesh, self.machine, self.answers = skeleton, mesh, machine, answers
        self.example = example.on_meta(mesh)
        module = skeleton.module
        named = dict(module.named_modules())
        self._weights = {named[name]: n for name, n in skeleton.weights().items()}
        self.canonical: dict[str, str] = {}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._whole: dict[str, Tensor] = {}
        self._leaves: dict[tuple[str, Spec], DTensor] = {}
        self._converters: dict[tuple[Any, ...], Any] = {}
        self._known: dict[Any, Cost] = {}
        self._beyond: dict[Any, Most] = {}
        self._gather_places(module)
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        for name, owner in named.items():
            owner.register_forward_pre_hook(self._before(name), with_kwargs=True)
            owner.register_forward_hook(self._after(name))

    def _gather_places(self, module: nn.Module) -> None:
        first: dict[int, str] = {}
        for prefix, owner in module.named_modules():
            for held in (owner._parameters, owner._buffers):
                for attribute, t in held.items():
                    if t is None:
                        continue
                    full = f"{prefix}.{attribute}" if prefix else attribute
                    name = self.canonical[full] = first.setdefault(id(t), full)
                    self._places.setdefault(name, []).append((held, attribute))
                    self._whole[name] = t

    # ---------------------------------------------------------------- hooks

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            convert = self._inputs.get(name)
            return None if convert is None else convert(module, args, kwargs)

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            convert = self._outputs.get(name)
            return None if convert is None else convert(module, args, output)

        return hook

    def _place(self, choices: Choices) -> None:
        """Lay out parameters and set up conversions as chosen."""
        self._inputs, self._outputs = {}, {}
        wanted: dict[tuple[str, str], list[tuple[Path, tuple[int | None, ...]]]] = {}
        for key, types in choices.items():
            if key.section != "parameter" and any(t is not None for t in types):
                wanted.setdefault((key.section, key.name), []).append((key.path, types))
        for (section, name), values in wanted.items():
            side = self._inputs if section == "input" else self._outputs
            side[name] = self._converter(section, name, tuple(values))
        for name, whole in self._whole.items():
            spec = self._spec(name, whole, choices)
            for held, attribute in self._places[name]:
                held[attribute] = self._leaf(name, whole, spec)

    def _spec(self, name: str, whole: Tensor, choices: Choices) -> Spec:
        types = choices.get(Key("parameter", name), (None,) * self.mesh.ndim)
        return spec_of(self.mesh, whole.shape, tuple(I if t is None else t for t in types))

    def _converter(self, section: str, name: str, values: tuple[tuple[Path, tuple[int | None, ...]], ...]) -> Any:
        """The hook that moves the inputs or outputs of a module."""
        found = self._converters.get((section, name, values))
        if found is None:
            requests = [
                Request(name, _ANY, tuple(None if t is None else to_placement(t) for t in types), section, path)
                for path, types in values
            ]
            if section == "input":
                found = InputHook(self.mesh, name, self.skeleton.module.get_submodule(name), requests)
            else:
                found = OutputHook(self.mesh, name, requests)
            self._converters[section, name, values] = found
        return found

    def _leaf(self, name: str, whole: Tensor, spec: Spec) -> DTensor:
        leaf = self._leaves.get((name, spec))
        if leaf is None:
            leaf = make(self.mesh.empty(spec.local_shape, whole.dtype), spec)
            if isinstance(whole, nn.Parameter):
                leaf = nn.Parameter(leaf, requires_grad=whole.requires_grad)  # type: ignore[assignment]
            self._leaves[name, spec] = leaf
        leaf.grad = None
        forget_casts(leaf)
        return leaf

    def known_as(self, key: Key) -> Key:
        """The key of a parameter under the first of its names; other keys as they are."""
        return Key(key.section, self.canonical[key.name]) if key.section == "parameter" else key

    # ---------------------------------------------------------------- the step

    def cost(self, choices: Choices, *, memory: bool = False, most: Most = _ANYTHING) -> Cost:
        """What a step under `choices` costs; remembered.

        Args:
            choices: the candidate.
            memory: whether to count what autograd keeps.
            most: beyond what nobody asks any more.

        Raises:
            TooMuch: it costs more than `most`.
            Exception: whatever the model raises.
        """
        key = (memory, frozenset(kv for kv in choices.items() if any(t is not None for t in kv[1])))
        found = self._known.get(key)
        if found is None:
            beyond = self._beyond.get(key)
            if beyond is not None and most.within(beyond):
                raise TooMuch
            try:
                found = self._known[key] = self._run(choices, memory, most)
            except TooMuch:
                self._beyond[key] = most
                raise
        return found

    def state(self, choices: Choices) -> tuple[int, int]:
        """Bytes of the rank's parameters, and of these with gradients and two moments."""
        parameters = state = 0
        for name, whole in self._whole.items():
            if isinstance(whole, nn.Parameter):
                size = math.prod(self._spec(name, whole, choices).local_shape) * whole.element_size()
                size *= self.skeleton.weight_of(name)
                parameters += size
                state += size * (4 if whole.requires_grad else 1)
        return parameters, state

    def _run(self, choices: Choices, memory: bool, most: Most) -> Cost:
        parameters, state = self.state(choices)
        if state > most.memory:
            raise TooMuch
        self._place(choices)
        meter = Meter(self._weights, self.machine, memory=memory, most=most, held=state)
        example = self.example
        with on_stage(self.answers), meter:
            loss = loss_of(self.skeleton.module(*example.args, **example.kwargs))
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        return Cost(
            meter.totals, meter.sent, meter.seconds, meter.flops, 3 * meter.touched + 2 * state, meter.implicit,
            parameters, state, meter.kept,
        )  # fmt: skip


def choices_of(requests: Requests, skeleton: Skeleton, mesh: RehearsalMesh) -> dict[Key, tuple[int | None, ...]]:
    """A plan as read, as choices about a skeleton."""
    choices: dict[Key, tuple[int | None, ...]] = {}
    found: dict[Key, list[tuple[Placement | None, ...]]] = {}
    ndims: dict[Key, int] = {}
    module = skeleton.module
    for name, t in module.named_parameters(remove_duplicate=False):
        for request in requests.parameter:
            if request.pattern.fullmatch(name):
                found.setdefault(Key("parameter", name), []).append(request.axes)
                ndims[Key("parameter", name)] = t.ndim
    for name, _ in module.named_modules():
        for request in requests.forward:
            if request.pattern.fullmatch(name):
                found.setdefault(Key(request.side, name, request.path), []).append(request.axes)
    for key, axes in found.items():
        choices[key] = tuple(
            None if p is None else to_axis_types([p], mesh_ndim=1, ndim=ndims.get(key, 64))[0]
            for p in merged(axes, mesh)
        )
    return choices


def failure(error: Exception) -> PlanError:
    """What to say where the model does not run without data."""
    return PlanError(
        f"the auto plan runs the model once on the meta device, which has shapes but no data, and it failed there: "
        f"{type(error).__name__}: {error}. Models that read values of tensors in forward (item(), if x.sum() > 0, "
        "nonzero) or make tensors on a device by name cannot be planned so: pass a plan, or the name of one"
    )
