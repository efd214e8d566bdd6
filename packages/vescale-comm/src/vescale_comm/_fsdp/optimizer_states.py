"""The state of any torch optimizer on shard parameters, in terms of whole parameters: by name, each with its place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError
from .info import ShardInfo
from .state import own_part

__all__ = ["load_optimizer_state", "optimizer_state"]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer that runs on the parameters of a sharded module.

    Tensors with an element per element of a parameter are labelled with their place in the whole and share memory
    with the optimizer, so a checkpoint can save them, and load any other layout into them.

    Args:
        optimizer: any of torch.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [...]}`, where groups list names of parameters.

    Raises:
        MismatchError: a parameter of the optimizer is not of a sharded module.
    """
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for parameter in group["params"]:
            info = _info(parameter)
            names.append(info.name)
            state = optimizer.state.get(parameter)
            if state:
                states[info.name] = {key: _label(value, parameter, info) for key, value in state.items()}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": states, "param_groups": groups}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer a state that `optimizer_state` returned, or one of whole tensors by name.

    Args:
        optimizer: with the same parameters in its groups.
        state: as `optimizer_state` returns it; tensors may be whole, or shards of the same elements.

    Raises:
        MismatchError: other groups or parameters, or a tensor that does not fit.
    """
    saved = list(state["param_groups"])
    if len(saved) != len(optimizer.param_groups):
        raise MismatchError(
            f"state: has {len(saved)} groups of parameters, the optimizer has {len(optimizer.param_groups)}."
        )
    numbered: dict[int, dict[str, Any]] = {}
    groups = []
    for number, (group, given) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        infos = [_info(parameter) for parameter in group["params"]]
        if sorted(info.name for info in infos) != sorted(given["params"]):
            other = sorted({info.name for info in infos} ^ set(given["params"]))
            raise MismatchError(
                f"state: group {number} has other parameters than the optimizer: {', '.join(other[:5])}."
            )
        places = []
        for info in infos:
            place = len(numbered)
            numbered[place] = {key: _own(key, value, info) for key, value in state["state"].get(info.name, {}).items()}
            places.append(place)
        groups.append({**given, "params": places})
    optimizer.load_state_dict(
        {"state": {place: values for place, values in numbered.items() if values}, "param_groups": groups}
    )


def _info(parameter: Tensor) -> ShardInfo:
    info = getattr(parameter, "vescale", None)
    if not isinstance(info, ShardInfo):
        raise MismatchError(
            f"optimizer: a parameter of shape {tuple(parameter.shape)} is not of a module that fully_shard sharded."
        )
    return info


def _label(value: Any, parameter: Tensor, info: ShardInfo) -> Any:
    if isinstance(value, Tensor) and value.dim() == 1 and value.shape == parameter.shape:
        return info.label(value)
    return value


def _own(key: str, value: Any, info: ShardInfo) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if key == "step" or (value.dim() == 0 and info.shape != ()):
        return value.clone()
    part, problem = own_part(value, info)
    if part is None:
        raise MismatchError(f"state: {key} of {info.name}: {problem}")
    return part.clone()  # torch's load_state_dict would go on with the memory that it was given
