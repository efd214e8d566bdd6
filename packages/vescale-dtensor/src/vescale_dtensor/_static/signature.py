"""What decides whether a recorded program fits a call: the inputs, the modules, and the modes of torch.

Everything is read with dispatch off, where a tensor's metadata are local and cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _random
from .._tensor import DTensor

_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]

__all__ = ["Held", "arguments_key", "modes_key"]

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NoKey(Exception):
    """A value of which nobody knows whether it is the same next time."""


def arguments_key(args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return what is hashable of the arguments of a call, and collect their tensors.

    Args:
        args: of the call.
        kwargs: of the call.
        tensors: gets the tensors, in order.

    Raises:
        NoKey: an argument is neither a tensor, a plain value, nor a list, tuple or dict of these.
    """
    found = tuple([_key(a, tensors) for a in args])
    if not kwargs:
        return found
    return (*found, *((name, _key(value, tensors)) for name, value in kwargs.items()))


def _key(value: Any, tensors: list[Tensor]) -> Any:
    cls = value.__class__
    if cls is DTensor or isinstance(value, Tensor):
        for number, known in enumerate(tensors):
            if known is value:
                return (Tensor, number)
        tensors.append(value)
        return tensor_key(value)
    if cls is tuple or cls is list or cls is torch.Size:
        return (cls, *[_key(v, tensors) for v in value])
    if cls is dict:
        return (dict, *[(k, _key(v, tensors)) for k, v in value.items()])
    if cls in _PLAIN:
        return (cls, value) if value == value else (cls, "nan")
    raise NoKey(f"an argument of type {cls.__name__}")


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what of a tensor decides what a program does with it; with dispatch off."""
    spec = tensor._spec if tensor.__class__ is DTensor else tensor.shape
    return spec, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.device


def modes_key() -> tuple[Any, ...]:
    """Return the modes of torch and of this package that change what operators do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        _random.state.mode,
        id(_random.state.token),
    )


class Held:
    """What the modules of a region hold: their tensors, and what else a program depends on.

    Args:
        modules: the outermost modules; those inside of them count too.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._roots = list(modules)
        self._children: list[int] | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._tables: list[dict[str, Any]] = []
        self._last: object = None
        self._number = 0
        self._numbers: dict[Any, int] = {}

    def _read(self) -> None:
        self.modules = list(dict.fromkeys(m for root in self._roots for m in root.modules()))
        self._tables = [m._modules for m in self.modules]
        self._children = self._child_ids()
        self._hooks = [getattr(m, name) for m in self.modules for name in _HOOKS]
        self._num_hooks = sum(map(len, self._hooks))
        self._slots = []
        seen: set[int] = set()
        for module in self.modules:
            for table in (module._parameters, module._buffers, module.__dict__):
                for name, value in table.items():
                    if isinstance(value, Tensor) and id(value) not in seen:
                        seen.add(id(value))
                        self._slots.append((table, name))

    def _child_ids(self) -> list[int]:
        return [id(child) for table in self._tables for child in table.values()]

    def tensors(self) -> list[Tensor]:
        """Return the tensors, each once; in the same order as long as `refresh` returns False."""
        return [table[name] for table, name in self._slots]

    def refresh(self) -> bool:
        """Look at the modules anew where submodules or attributes came or went, and tell whether they did."""
        if self._child_ids() == self._children and all(
            isinstance(table.get(name), Tensor) for table, name in self._slots
        ):
            return False
        self._read()
        return True

    @property
    def hooked(self) -> str | None:
        """Name a module inside that has hooks of the user; None if none has."""
        for module in self.modules:
            if module in self._roots:
                continue
            for name in _HOOKS:
                for hook in getattr(module, name).values():
                    if not type(hook).__module__.startswith("vescale_dtensor"):
                        return type(module).__name__
        return None

    def state(self, tensors: Sequence[Tensor]) -> int:
        """Return a number for what of the modules decides which program fits: equal numbers, equal state."""
        now = (
            list(map(id, tensors)),
            list(map(_requires_grad, tensors)),
            list(map(_dtype, tensors)),
            [m.training for m in self.modules],
            sum(map(len, self._hooks)),
        )
        if now != self._last:
            # Only tensors that were put in place of others need a closer look, for their layouts.
            layouts = tuple([tensor_key(t) for t in tensors])
            self._number = self._numbers.setdefault((layouts, tuple(now[3]), now[4]), len(self._numbers))
            self._last = now
        return self._number
