"""Which ranks hold copies of which parameter: groups from meshes, and lanes from the parameters of a module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from .. import _hooks
from .._gradients import Lane, gather_bytes, is_plain, local_of
from .._transport import Transport
from ..errors import CommError, PlanError

__all__ = ["Groups", "group_of", "reduced", "trainable"]


def group_of(group_or_mesh: Any) -> dist.ProcessGroup:
    """Return the process group of a mesh, all its dimensions together, or of None, which means all ranks.

    All ranks of a mesh of several dimensions must call it.

    Raises:
        TypeError: it is neither.
    """
    if group_or_mesh is None:
        if not dist.is_initialized():
            raise CommError("There is no process group: call torch.distributed.init_process_group, or give one.")
        group_or_mesh = dist.group.WORLD
    if isinstance(group_or_mesh, dist.ProcessGroup):
        return group_or_mesh
    if not hasattr(group_or_mesh, "get_group") or not hasattr(group_or_mesh, "ndim"):
        raise TypeError(
            f"group_or_mesh: needs a ProcessGroup, a DeviceMesh, or None for all ranks; got {type(group_or_mesh)}."
        )
    if group_or_mesh.ndim == 1:
        found: dist.ProcessGroup = group_or_mesh.get_group(0)
        return found
    return _new_group(group_or_mesh.mesh.flatten().tolist())


def _new_group(ranks: Iterable[int]) -> dist.ProcessGroup:
    found: dist.ProcessGroup = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return found


@dataclass(frozen=True)
class _Key:
    """Parameters with equal keys share a lane."""

    pattern: str | None
    """The pattern that named their group; None: the main one."""
    ranks: tuple[int, ...] = ()
    """Ranks along the mesh axes over which their gradients are pending sums, this one included."""


class Groups:
    """Sorts the parameters of a module into lanes.

    Args:
        main: the ranks that see different data.
        transport_of: makes the transport of a group.
        others: groups, meshes, or None for parameters that are not reduced, by patterns that fit whole names.
        divisor: of all sums: the number of ranks that see different data, or 1.
    """

    def __init__(
        self,
        main: dist.ProcessGroup,
        transport_of: Callable[[dist.ProcessGroup], Transport],
        others: Mapping[str, Any],
        divisor: float,
    ) -> None:
        self.main = transport_of(main)
        """Transport over the ranks that see different data."""
        self._main_group, self._transport_of, self._divisor = main, transport_of, divisor
        self._others = [(re.compile(pattern), pattern, group) for pattern, group in others.items()]
        self._transports: dict[_Key, Transport] = {_Key(None): self.main}

    def lanes(self, parameters: Sequence[tuple[str, Parameter]]) -> list[Lane]:
        """Return the lanes of parameters, the main one first; all ranks must call it with the same ones.

        Args:
            parameters: names and parameters.
        """
        sorted_by_key: dict[_Key, list[tuple[str, Parameter]]] = {key: [] for key in self._transports}
        axes: dict[str, tuple[int, ...]] = {}
        for name, param in parameters:
            key = self._key(name, param, axes)
            if key is not None:
                sorted_by_key.setdefault(key, []).append((name, param))
        device = local_of(parameters[0][1]).device if parameters else None
        for key in sorted_by_key:
            if key not in self._transports:
                self._transports[key] = self._transport_of(self._group(key, device))
        return [Lane(members, self._transports[key], self._divisor, axes) for key, members in sorted_by_key.items()]

    def _key(self, name: str, param: Parameter, axes: dict[str, tuple[int, ...]]) -> _Key | None:
        for expression, pattern, group in self._others:
            if expression.fullmatch(name):
                return None if group is None else _Key(pattern)
        if is_plain(param):
            return _Key(None)
        answer = _hooks.gradient_reduction(param)
        if answer is None or not answer[1]:
            return _Key(None)
        mesh, along = answer
        axes[name] = along
        return _Key(None, _ranks_along(mesh, along))

    def _group(self, key: _Key, device: Any) -> dist.ProcessGroup:
        if key.pattern is not None:
            return group_of(next(group for _, pattern, group in self._others if pattern == key.pattern))
        # One reduction over both: the ranks along those axes, of every rank that sees other data.
        lists = gather_bytes(self.main, ",".join(map(str, key.ranks)).encode(), device)
        union = {int(rank) for one in lists for rank in one.decode().split(",")}
        if union == set(dist.get_process_group_ranks(self._main_group)):
            return self._main_group
        return _new_group(union)

    def close(self) -> None:
        """Close the transports."""
        for transport in self._transports.values():
            transport.close()


def _ranks_along(mesh: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one along some axes of a mesh only, this one included."""
    here = mesh.get_coordinate()
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
    return tuple(mesh.mesh[index].flatten().tolist())


def trainable(module: nn.Module) -> list[tuple[str, Parameter]]:
    """Return the parameters of a module that require gradients, each once, in the order of the module."""
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def reduced(module: nn.Module, others: Mapping[str, Any]) -> list[tuple[str, Parameter]]:
    """Return the trained parameters that are reduced: all but those whose first fitting pattern has the group None.

    Args:
        module: whose parameters.
        others: groups by patterns.

    Raises:
        PlanError: a pattern is no regular expression, or fits no parameter, so that what it meant would be reduced
            over all ranks.
    """
    names = [name for name, _ in module.named_parameters()]
    expressions = []
    for pattern, group in others.items():
        try:
            expressions.append((re.compile(pattern), group))
        except re.error as error:
            raise PlanError(f"groups: the pattern {pattern!r} is no regular expression: {error}.") from None
        if not any(map(expressions[-1][0].fullmatch, names)):
            nearest = difflib.get_close_matches(pattern, names, 3, 0)
            raise PlanError(
                f"groups: the pattern {pattern!r} fits no parameter; it must fit a whole name, such as "
                f"{', '.join(nearest)}."
            )
    found = []
    for name, param in trainable(module):
        groups = [group for expression, group in expressions if expression.fullmatch(name)]
        if not groups or groups[0] is not None:
            found.append((name, param))
    return found
