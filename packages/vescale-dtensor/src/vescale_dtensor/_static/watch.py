"""What a step does below the functions that Python sees: where it writes, and which values it reads.

Names of functions do not tell all: custom operators, collectives and slices by tensors write to memory or read values
without a word. Every operator comes by here on its way to its kernel, while a call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Effects", "Watch", "memory_of", "tensors_of"]

_TAGS = {
    torch.Tag.data_dependent_output: "reads",
    torch.Tag.dynamic_output_shape: "reads",
    torch.Tag.nondeterministic_seeded: "draws",
}


@dataclass(slots=True)
class Effects:
    """What operators did besides returning a result."""

    written: set[int] = field(default_factory=set)
    """Memory that they wrote to."""
    reads: str = ""
    """Name of an operator whose result, or its shape, depends on values in a way that Python may see."""
    draws: bool = False
    """Whether they moved a generator."""

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add what one operator does."""
        for tag in getattr(operator, "tags", ()):
            effect = _TAGS.get(tag)
            if effect == "draws":
                self.draws |= not _drops_nothing(operator, args, kwargs)
            elif effect == "reads":
                self.reads = operator.__name__
        schema = getattr(operator, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                self.written.update(map(memory_of, tensors_of(value)))


def _drops_nothing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, such as attention, could draw a mask but is asked to keep everything."""
    for number, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            asked = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(asked == 0)
    return False


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and adds to the step that it belongs to.

    Args:
        outside: is told of the effects of operators that belong to no step.
    """

    def __init__(self, outside: Callable[[Any, Effects], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = outside
        self._steps: list[Effects] = []

    def begin(self) -> None:
        """From now on operators belong to one step."""
        self._steps.append(Effects())

    def end(self) -> Effects:
        """The step is done; returns what it did."""
        return self._steps.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if self._steps:
                self._steps[-1].note(func, args, kwargs)
            else:
                effects = Effects()
                effects.note(func, args, kwargs)
                self._outside(func, effects)
            return func(*args, **kwargs)


def memory_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common; with dispatch off."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif isinstance(one, dict):
            stack.extend(reversed(one.values()))
    return found
