"""Parameter groups as users write them -> parameters with names, group by group."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PlanError

__all__ = ["Group", "Params", "check_class", "named", "read_group", "read_groups"]

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
OWN_KEYS = ("params", "param_names", "optimizer", "plan")


@dataclass(slots=True)
class Group:
    """One group of parameters."""

    names: list[str]
    """Names of the parameters that are trained."""
    parameters: list[Tensor]
    """The parameters themselves."""
    options: dict[str, Any]
    """Hyperparameters of the optimizer that the group sets."""
    optimizer: type[Optimizer] | None = None
    """The class that updates this group; None: that of the others."""
    plan: Any = None
    """How this group is cut; None: as the others."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Parameters of the group that need no gradient, by name; they are left alone."""


def named(groups: Iterable[Group]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and parameters of groups."""
    for group in groups:
        yield from zip(group.names, group.parameters, strict=True)


def read_groups(given: Params, model: nn.Module | None) -> list[Group]:
    """Return the groups that an optimizer is to have.

    Args:
        given: a module, whose parameters are one group; or what torch's optimizers take.
        model: where the parameters get their names from, if they come without.

    Raises:
        ValueError: no parameters, a parameter given twice, or two of one name.
        TypeError: something that is no parameter.
    """
    if isinstance(given, nn.Module):
        given = list(given.named_parameters())
    if isinstance(given, Tensor):
        raise TypeError("params_or_model: got one tensor; pass a list of tensors, or the model.")
    items: list[Any] = list(given)
    if not items:
        raise ValueError("params_or_model: there are no parameters; was a generator used up before?")
    if not isinstance(items[0], Mapping):
        items = [{"params": items}]
    known = _known_names(model)
    groups = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(f"params_or_model: entry {number} is a {type(item).__name__} among groups that are dicts.")
        groups.append(_read(item, number, known))
    if not any(group.parameters for group in groups):
        raise ValueError("params_or_model: none of the parameters requires a gradient.")
    _check_distinct(groups)
    return groups


def read_group(given: Mapping[str, Any], number: int, model: nn.Module | None, others: Sequence[Group]) -> Group:
    """Return a group that joins others; parameters that were frozen there and are trained now belong to it alone.

    Raises:
        ValueError: a parameter or name is among the others already, or none is trained.
    """
    group = _read(given, number, _known_names(model))
    if not group.parameters:
        raise ValueError(f"param_group {number}: none of its parameters requires a gradient.")
    joining = set(map(id, group.parameters))
    for other in others:
        other.frozen = {name: p for name, p in other.frozen.items() if id(p) not in joining}
    _check_distinct([*others, group])
    return group


def _known_names(model: nn.Module | None) -> dict[int, str]:
    return {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}


def _read(given: Mapping[str, Any], number: int, known: Mapping[int, str]) -> Group:
    if "params" not in given:
        raise ValueError(f'param_group {number}: has no "params", only {sorted(given)}.')
    cls = given.get("optimizer")
    if cls is not None:
        check_class(f'param_group {number}: "optimizer"', cls)
    options = {key: value for key, value in given.items() if key not in OWN_KEYS}
    group = Group([], [], options, cls, given.get("plan"))
    for name, parameter in _named(given["params"], number, known):
        if parameter.requires_grad:
            group.names.append(name)
            group.parameters.append(parameter)
        else:
            group.frozen[name] = parameter
    return group


def _named(params: Any, number: int, known: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(params, set):
        raise TypeError(f"param_group {number}: a set has no order that all ranks share; pass a list.")
    for place, item in enumerate([params] if isinstance(params, Tensor) else params):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if not isinstance(parameter, Tensor):
            raise TypeError(f"param_group {number}: entry {place} is a {type(parameter).__name__}, not a tensor.")
        if not parameter.is_leaf:
            raise ValueError(f"param_group {number}: entry {place} is the result of an operator, not a parameter.")
        yield name or known.get(id(parameter)) or f"{number}.{place}", parameter


def _check_distinct(groups: Iterable[Group]) -> None:
    by_name: dict[str, int] = {}
    by_id: dict[int, str] = {}
    for group in groups:
        pairs = [*zip(group.names, group.parameters, strict=True), *group.frozen.items()]
        for name, parameter in pairs:
            if id(parameter) in by_id:
                raise ValueError(f"The parameter {name} is given twice, also as {by_id[id(parameter)]}.")
            if name in by_name:
                raise ValueError(f"Two parameters are called {name}: give each a name of its own.")
            by_id[id(parameter)], by_name[name] = name, 1


def check_class(name: str, given: Any) -> None:
    """Check what is to make updates.

    Args:
        name: of the argument.
        given: what the user gave.

    Raises:
        TypeError: it is no class of optimizers.
        PlanError: its steps call a closure themselves, so they would need whole parameters between the calls.
    """
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        what = f"the class {given.__name__}" if isinstance(given, type) else f"a value of type {type(given).__name__}"
        raise TypeError(f"{name}: expected a subclass of torch.optim.Optimizer, the class itself, but got {what}.")
    closure = inspect.signature(given.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{name}: a step of {given.__name__} computes the loss several times, for which it needs whole parameters; "
            f"it cannot be sharded. Run it under replicate, which leaves parameters whole."
        )
