"""The optimizers of torch that do the updates, on segments instead of parameters.

There is one per class; its groups are those of the outer optimizer that name the class. Hyperparameters live in the
outer groups, where schedulers and users change them, and are carried over for each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import CommError
from .groups import OWN_KEYS, Group
from .segments import Segment, state_tensor

__all__ = ["Inner"]


class Inner:
    """Optimizers over segments."""

    def __init__(
        self, main_class: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Group], segments: list[Segment]
    ) -> None:
        """Make the optimizers.

        Args:
            main_class: of the groups that name none.
            options: arguments of `main_class`.
            groups: the groups, of which only options and classes are read.
            segments: on this rank; those of a group may be none.
        """
        self._main_class, self._options = main_class, dict(options)
        self.segments = segments
        self._home: list[tuple[Optimizer, int]] = []  # of each outer group: its optimizer, its number there
        self._unchecked = [segment for segment in segments if segment.merged]
        self.optimizers: dict[type[Optimizer], Optimizer] = {}
        for number, group in enumerate(groups):
            self._add(number, group)

    def add(self, group: Group, segments: Sequence[Segment]) -> None:
        """Add a group, which is the next one in number."""
        self.segments += segments
        self._unchecked += [segment for segment in segments if segment.merged]
        self._add(len(self._home), group)

    def _add(self, number: int, group: Group) -> None:
        cls = group.optimizer or self._main_class
        tensors = [segment.tensor for segment in self.segments if segment.group == number]
        options = {**group.options, "params": tensors}
        made = self.optimizers.get(cls)
        if made is None:
            arguments = self._options if cls is self._main_class else {}
            made = self.optimizers[cls] = cls([options], **_fused(cls, arguments, group))
        else:
            made.add_param_group(options)
        self._home.append((made, len(made.param_groups) - 1))

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the main class."""
        made = self.optimizers.get(self._main_class)
        return dict(next(iter(self.optimizers.values())).defaults if made is None else made.defaults)

    def options(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of a group."""
        return {key: value for key, value in self._group(number).items() if key not in OWN_KEYS}

    def _group(self, number: int) -> dict[str, Any]:
        made, place = self._home[number]
        return made.param_groups[place]

    def push(self, outer: Sequence[Mapping[str, Any]]) -> None:
        """Take over the hyperparameters of the outer groups."""
        for number, group in enumerate(outer):
            inner = self._group(number)
            for key, value in group.items():
                if key not in OWN_KEYS:
                    inner[key] = value

    def pull(self, outer: Sequence[dict[str, Any]]) -> None:
        """Give back what the optimizers have changed in their groups."""
        for number, group in enumerate(outer):
            group.update(self.options(number))

    def step(self) -> None:
        """Update all segments that have a gradient."""
        for made in self.optimizers.values():
            made.step()
        self._check_state()

    def _check_state(self) -> None:
        """Refuse a state that only an optimizer that looks beyond single elements would keep; once per segment."""
        unchecked, self._unchecked = self._unchecked, []
        for segment in unchecked:
            state = self.state(segment)
            if not state:
                self._unchecked.append(segment)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != segment.shape:
                    cls = type(self._home[segment.group][0]).__name__
                    raise CommError(
                        f"{cls} keeps {key} of shape {list(value.shape)} for a flat shard of {list(segment.shape)} "
                        f"elements ({segment.members[0].name} and others): it does not treat elements alone, so that "
                        f'its update was wrong. Use plan="whole".'
                    )

    def state(self, segment: Segment) -> dict[str, Any]:
        """Return the state that the optimizer keeps for a segment; an empty dict before its first update."""
        found: dict[str, Any] = self._home[segment.group][0].state.get(segment.tensor, {})
        return found

    def put_state(self, segment: Segment, state: dict[str, Any]) -> None:
        """Replace the state of a segment."""
        self._home[segment.group][0].state[segment.tensor] = state

    def split(self, segment: Segment) -> list[Segment]:
        """Replace a segment by one per parameter, with the same values and states.

        Returns:
            The new segments.
        """
        made, place = self._home[segment.group]
        state = made.state.pop(segment.tensor, None)
        parts = segment.split()
        for part, member in zip(parts, segment.members, strict=True):
            if state is not None:
                made.state[part.tensor] = dict(_narrowed(state, segment, member.offset, member.numel))
        tensors = made.param_groups[place]["params"]
        at = next(n for n, tensor in enumerate(tensors) if tensor is segment.tensor)
        tensors[at : at + 1] = [part.tensor for part in parts]
        at = self.segments.index(segment)
        self.segments[at : at + 1] = parts
        return parts


def _narrowed(state: Mapping[str, Any], segment: Segment, offset: int, numel: int) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        elements = state_tensor(value, segment)
        if elements is not None:
            yield key, elements[offset : offset + numel]
        else:
            yield key, value.clone() if isinstance(value, Tensor) else value


def _fused(cls: type[Optimizer], options: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return the options, with the fused implementation on CUDA where the class has one and nobody chose another.

    On the CPU the fused kernels round the last few elements of a tensor in another way than the others, so that bits
    would depend on where parameters are cut. The choice must not depend on what a rank holds: hyperparameters are the
    same on all of them.
    """
    given = {**options, **group.options}
    chosen = any(given.get(key) is not None for key in ("foreach", "fused")) or given.get("differentiable")
    fits = all(parameter.is_floating_point() and parameter.is_cuda for parameter in group.parameters)
    if chosen or not fits or isinstance(given.get("lr"), Tensor) or "fused" not in inspect.signature(cls).parameters:
        return dict(options)
    return {**options, "fused": True}
