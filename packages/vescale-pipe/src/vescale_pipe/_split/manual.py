"""`manual`: stages written by hand, and which value goes where."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import SplitError
from .build import tied_parameters
from .graph import Port, Stage, StageGraph
from .names import nearest
from .tree import Slot, mapped

__all__ = ["Source", "manual"]

Source = int | str | tuple[int, Any]
"""`int` or `str`: argument of the batch by position or name; (stage, where): part of a stage's result, as an index, a
key, the name of an attribute, a tuple of these, or None for all of it."""


def manual(
    stages: Sequence[nn.Module], inputs: Sequence[Sequence[Source] | Mapping[str, Source] | None] | None = None
) -> StageGraph:
    """Put stages together that were written by hand.

    Args:
        stages: modules, in the order of the forward. Names of parameters are those of each module.
        inputs: per stage what its arguments are: a sequence for positional ones or a mapping for named ones; None: what
            the stage before returns (a tuple gives several arguments), and for the first stage the batch's first
            positional arguments, as many as its `forward` has without a default.

    Returns:
        the graph. Nothing is run, so of the last stage's outputs only the tensors are counted, when it has run.

    Raises:
        SplitError: a stage takes a value of itself or a later one, or an argument that its forward doesn't have.

    Example:
        >>> import torch
        >>> graph = manual([nn.Linear(2, 3), nn.Linear(3, 1)])
        >>> graph.edges, graph.run(torch.ones(4, 2)).shape
        (((0, 1),), torch.Size([4, 1]))
    """
    modules = list(stages)
    if not modules:
        raise SplitError("manual: there is no stage.")
    given = list(inputs) if inputs is not None else [None] * len(modules)
    if len(given) != len(modules):
        raise SplitError(f"manual: {len(given)} entries in inputs for {len(modules)} stages; give one each.")
    picks: list[list[Any]] = [[] for _ in modules]
    spread: list[int | None] = [None] * len(modules)
    ports: list[tuple[Port, ...]] = []
    named: list[tuple[str | None, ...]] = []
    for index, (module, sources) in enumerate(zip(modules, given, strict=True)):
        if sources is None and index:
            count = spread[index - 1] = max(1, len(_required(module)))
            sources = [(index - 1, _Spread(number)) for number in range(count)]
        elif sources is None:
            sources = list(range(max(1, len(_required(module)))))
        if isinstance(sources, Mapping):
            _check_names(index, module, sources)
        keys = tuple(sources) if isinstance(sources, Mapping) else (None,) * len(sources)
        values = list(sources.values()) if isinstance(sources, Mapping) else list(sources)
        ports.append(tuple(_port(index, value, picks) for value in values))
        named.append(keys)
    made = []
    for index, module in enumerate(modules):
        last = index == len(modules) - 1
        wrapped = ManualModule(index, module, named[index], None if last else picks[index], spread[index])
        count = -1 if last else len(picks[index])
        made.append(Stage(index, wrapped, ports[index], count, (True,) * max(count, 0)))
    edges = {(int(port.key), stage.index) for stage in made for port in stage.inputs if port.source == "stage"}
    final: Any = made[-1].module
    return StageGraph(tuple(made), tuple(sorted(edges)), tied_parameters(made), template=final.output_template)


class _Spread(tuple[int]):
    """One of the arguments that a stage hands to the next: an item of a tuple, or all if there is only one."""

    __slots__ = ()

    def __new__(cls, number: int) -> _Spread:
        return super().__new__(cls, (number,))


class ManualModule(nn.Module):
    """A stage written by hand, called with one value per input; it has the parameters of that stage by its names."""

    def __init__(
        self,
        index: int,
        stage: nn.Module,
        named: Sequence[str | None],
        picks: Sequence[Any] | None,
        spread: int | None,
    ) -> None:
        super().__init__()
        vars(self)["_stage"] = stage  # not registered, so that no name gets longer
        self._modules, self._parameters, self._buffers = stage._modules, stage._parameters, stage._buffers
        self._non_persistent_buffers_set = stage._non_persistent_buffers_set
        self.training = stage.training
        self._index, self._named, self._picks, self._spread = index, tuple(named), picks, spread
        self._template: Any = None

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Run the stage."""
        args = [value for name, value in zip(self._named, values, strict=True) if name is None]
        kwargs = {name: value for name, value in zip(self._named, values, strict=True) if name is not None}
        result = vars(self)["_stage"](*args, **kwargs)
        if self._picks is not None:
            return tuple(self._pick(result, where) for where in self._picks)
        found: list[Tensor] = []

        def leaf(item: Any, path: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            found.append(item)
            return Slot(len(found) - 1)

        self._template = mapped(leaf, result)
        return tuple(found)

    def _pick(self, result: Any, where: Any) -> Any:
        if type(where) is _Spread:
            several = isinstance(result, (tuple, list))
            count = len(result) if several else 1
            if count != self._spread:
                raise SplitError(
                    f"stage {self._index} returns {count} values, and stage {self._index + 1} takes {self._spread}. "
                    "Say in `inputs` which go where."
                )
            return result[where[0]] if several else result
        for step in where if isinstance(where, tuple) else () if where is None else (where,):
            try:
                is_name = isinstance(step, str) and not isinstance(result, Mapping)
                result = getattr(result, step) if is_name else result[step]
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise SplitError(
                    f"stage {self._index} returns a {type(result).__name__}, in which there is no {step!r} that a "
                    "later stage takes."
                ) from error
        return result

    def output_template(self) -> Any:
        """Return the structure of what the stage returned last."""
        return self._template

    def train(self, mode: bool = True) -> ManualModule:
        """Set the mode of the stage."""
        self.training = mode
        vars(self)["_stage"].train(mode)
        return self


def _required(module: nn.Module) -> list[str]:
    """Return the positional parameters of a forward that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(module.forward).parameters.values()
    return [one.name for one in found if one.kind in kinds and one.default is inspect.Parameter.empty]


def _check_names(index: int, module: nn.Module, sources: Mapping[str, Any]) -> None:
    found = inspect.signature(module.forward).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values()):
        return
    for name in sources:
        if name not in found:
            raise SplitError(
                f"inputs of stage {index}: the forward of {type(module).__name__} has no argument {name!r}."
                f"{nearest(name, found)}"
            )


def _port(index: int, source: Any, picks: list[list[Any]]) -> Port:
    if isinstance(source, (int, str)):
        return Port("batch", source, 0)
    stage, where = source
    if not (isinstance(stage, int) and 0 <= stage < index):
        raise SplitError(f"inputs of stage {index}: takes a value of stage {stage!r}; it must be one before it.")
    for number, known in enumerate(picks[stage]):
        if type(known) is type(where) and known == where:
            return Port("stage", stage, number)
    picks[stage].append(where)
    return Port("stage", stage, len(picks[stage]) - 1)
