"""`split`: a model becomes stages, by one recorded forward and cuts at the borders of its modules."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import SplitError
from .balance import partition
from .build import build_stages, tied_parameters
from .cut import cut, stage_of
from .graph import StageGraph, Unit
from .guards import guard_function
from .names import Names, choose_units, nearest
from .record import record
from .tree import Slot, leaves, mapped
from .values import Node, Recording, Value

__all__ = ["split"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SHOWN = 12
Costs = Literal["auto", "parameters"] | Sequence[float] | Mapping[str, float]


def split(
    model: nn.Module,
    *,
    at: Sequence[str] | None = None,
    num_stages: int | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    units: Sequence[str | type] | None = None,
    costs: Costs = "auto",
) -> StageGraph:
    """Cut a model into stages without a change to it.

    The model is run once per mode (training, evaluation) with stand-ins on meta for its weights: nothing is computed
    but what depends on the inputs alone. Modules that contain no cut are called as they are, with their hooks, modes,
    checkpoints and wrappers; what happens between them is recorded: calls of torch functions, with sizes and Python
    values as they are in the example. What depends on inputs only (masks, positions,
    rotary tables) is computed by each stage that needs it. Hooks of modules that contain a cut do not run in stages.

    Args:
        model: on any device, also meta.
        at: names of the modules at which a new stage begins; they may be nested ("encoder.layers.3").
        num_stages: instead of `at`: cut so that the largest cost of a stage is as small as possible.
        example_args: positional arguments of one micro-batch; values matter only where code between modules looks at
            them.
        example_kwargs: keyword arguments likewise.
        units: names or classes of modules that must stay whole; everything around them may be cut. Default: with `at`,
            whatever contains no cut; with `num_stages`, the items of lists and sequences of modules.
        costs: for `num_stages`: "auto" (estimated FLOPs), "parameters", or what each unit costs, by name or in the
            order of `StageGraph.units`.

    Returns:
        the stages. Shapes of the example and Python values between modules are part of it: see
        `StageGraph.for_batch`.

    Raises:
        SplitError: a name is wrong, a stage would be empty, or the model does between its modules what can't be
            recorded; the message says where and with which value.
    """
    if (at is None) == (num_stages is None):
        raise SplitError("split: give either at=[names of modules] or num_stages=, not both or none.")
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
        raise SplitError(f"split: num_stages is {num_stages!r}; it must be a whole number from 1.")
    if not isinstance(model, nn.Module):
        raise SplitError(f"split: model is a {type(model).__name__}; it must be a module (nn.Module).")
    if isinstance(at, str):
        at = [at]
    names = Names(model)
    chosen, opened = choose_units(names, at, units, num_stages)
    _warn_of_hooks(names, opened)
    recipe = _Recipe(names, chosen, opened)
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    try:
        recording, mode = record(names, chosen, opened, args, kwargs, count_flops=num_stages is not None)
    except TypeError as error:
        reason = _misfit(model, args, kwargs)
        if reason is None:
            raise
        raise SplitError(
            f"split: {type(model).__name__}.forward cannot be called with the example: {reason}. Give example_args and "
            "example_kwargs, or the arguments of the engine's call, as the model takes them."
        ) from error
    costs_of = _costs(recording, names, costs) if num_stages is not None else {}
    if num_stages is not None:
        at = _balanced(recording, names, costs_of, num_stages)
    return recipe.graph(recording, mode, tuple(at or ()), costs_of, args, kwargs)


def _misfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a forward does not take some arguments; None if it does."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # compiled code does not say what it takes
        return None
    return None


def _warn_of_hooks(names: Names, opened: set[int]) -> None:
    for name, module in names.modules.items():
        if id(module) in opened and any(getattr(module, kind) for kind in _HOOKS):
            warnings.warn(
                f"split: {name or type(module).__name__!r} is cut into stages, so its forward and backward hooks will "
                "not run in them; put them on modules inside, or name it in `units`.",
                stacklevel=3,
            )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What is needed to split the same model at the same places for other inputs."""

    names: Names
    """Of the model."""
    units: set[int]
    """What is called as a whole."""
    opened: set[int]
    """What is recorded call by call."""

    def graph(
        self,
        recording: Recording,
        mode: bool | None,
        at: tuple[str, ...],
        costs: dict[str, float],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StageGraph:
        starts = _starts(recording, self.names, at)
        parts = cut(recording, starts)
        stages, crossings = build_stages(recording, parts, self.names)
        edges = sorted({(crossing.producer, crossing.consumer) for crossing in crossings})
        stage_numbers = stage_of(recording, starts)
        units = []
        for node in _first_calls(recording):
            module = self.names.modules[str(node.module)]
            size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
            name = str(node.module)
            units.append(Unit(name, stage_numbers[node.number], costs.get(name, 0.0), size))
        guard = guard_function(recording, self.names)
        signature = _signature(args, kwargs)

        def accepts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return _signature(args, kwargs) == signature and guard(args, kwargs)

        def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageGraph:
            fresh, mode = record(self.names, self.units, self.opened, args, kwargs)
            return self.graph(fresh, mode, at, costs, args, kwargs)

        return StageGraph(
            tuple(stages),
            tuple(edges),
            tied_parameters(stages),
            tuple(crossings),
            tuple(units),
            mode,
            _template(recording.output),
            accepts,
            again,
            self.names.model,
        )


def _template(output: Any) -> Any:
    count = 0

    def leaf(item: Any, path: Any) -> Any:
        nonlocal count
        if not isinstance(item, Value):
            return item
        count += 1
        return Slot(count - 1)

    return mapped(leaf, output)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found, spec = pytree.tree_flatten((args, kwargs))
    return spec, [
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in found
    ]


def _starts(recording: Recording, names: Names, at: Sequence[str]) -> list[int]:
    """Return the number of the first call of each stage."""
    found: dict[int, str] = {0: ""}
    for name in at:
        first = names.first(names.find(name, "at"))
        if first not in recording.entries:
            known = [name for name in recording.entries if name]
            raise SplitError(
                f"at={name!r}: this module is not called in the forward with the example inputs, so no stage can begin "
                f"there.{nearest(name, known)}"
            )
        start = recording.entries[first]
        if start in found:
            other = f"at={found[start]!r}" if found[start] else "the beginning of the model"
            raise SplitError(
                f"at={name!r}: nothing happens between {other} and this module, so a stage would be empty."
            )
        found[start] = name
    starts = sorted(found)
    stages = set(stage_of(recording, starts).values())
    for index in range(len(starts)):
        if index not in stages:
            name = found[starts[index]] or found[starts[min(index + 1, len(starts) - 1)]]
            raise SplitError(
                f"at={name!r}: stage {index} would be empty: what happens there depends on the inputs only and is "
                "repeated wherever it is needed. Cut at another module."
            )
    return starts


def _first_calls(recording: Recording) -> list[Node]:
    """Return the first call of each unit that belongs to one stage."""
    found: dict[str, Node] = {}
    for node in recording.nodes:
        if node.module is not None and not node.known:
            found.setdefault(node.module, node)
    return list(found.values())


def _costs(recording: Recording, names: Names, costs: Costs) -> dict[str, float]:
    """Return what each unit costs, with what follows it up to the next."""
    first = _first_calls(recording)
    called = [str(node.module) for node in first]
    if isinstance(costs, Mapping):
        unknown = [name for name in costs if name not in called]
        if unknown:
            raise SplitError(f"costs: no unit is called {unknown[0]!r}.{nearest(unknown[0], called)}")
        return {name: float(costs.get(name, 0.0)) for name in called}
    if not isinstance(costs, str):
        if len(costs) != len(called):
            raise SplitError(
                f"costs: {len(costs)} numbers for {len(called)} units, which are {', '.join(called)}. Give one each."
            )
        return dict(zip(called, map(float, costs), strict=True))
    sizes = {name: float(sum(parameter.numel() for parameter in names.modules[name].parameters())) for name in called}
    if costs == "parameters":
        return sizes
    if costs != "auto":
        raise SplitError(f"costs is {costs!r}; it must be 'auto', 'parameters', or numbers.")
    total = dict.fromkeys(called, 0.0)
    current = called[0] if called else ""
    numbers = {node.number: str(node.module) for node in first}
    for node in recording.nodes:
        current = numbers.get(node.number, current)
        if not node.known and current:
            total[current] += node.cost
    return total if any(total.values()) else sizes


def _balanced(recording: Recording, names: Names, costs: dict[str, float], num_stages: int) -> list[str]:
    """Return the modules at which stages begin."""
    first = _first_calls(recording)
    if len(first) < num_stages:
        kind = type(names.model).__name__
        if len(names.modules) == 1:
            raise SplitError(
                f"num_stages={num_stages}: {kind} holds no other modules, and stages are made of whole modules, so it "
                "cannot be cut. Put its parts into modules, or use one stage."
            )
        some = ", ".join(str(node.module) for node in first[:SHOWN]) + (", ..." if len(first) > SHOWN else "")
        raise SplitError(
            f"num_stages={num_stages}: {kind} has only {len(first)} modules to divide ({some}). Use fewer stages, or "
            "name smaller modules in `units`."
        )
    borders = _borders(recording, [node.number for node in first])
    starts = partition([costs[str(node.module)] for node in first], num_stages, borders)
    return [str(first[start].module) for start in starts[1:]]


def _borders(recording: Recording, numbers: Sequence[int]) -> list[float]:
    """Return the bytes that would be sent over a cut before each of these calls."""
    last: dict[int, int] = {}
    for node in recording.nodes:
        if node.known:
            continue
        for leaf in leaves((node.args, node.kwargs)):
            if isinstance(leaf, Value):
                last[leaf.number] = node.number
    for leaf in leaves(recording.output):
        if isinstance(leaf, Value):
            last[leaf.number] = len(recording.nodes)
    borders = []
    for number in numbers:
        size = 0
        for value in recording.values:
            if (
                value.node is not None
                and not value.node.known
                and value.node.number < number <= last.get(value.number, -1)
            ):
                size += value.tensor.numel() * value.tensor.element_size()
        borders.append(float(size))
    return borders
