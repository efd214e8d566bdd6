"""Which value each tensor in the hands of the user's code is, and which values share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SplitError
from .calls import on_meta, plain_function
from .places import place
from .swap import Weights
from .tree import Path, mapped
from .values import Node, Value

__all__ = ["Ledger"]


class Ledger:
    """Values of a recording by the tensors that stand for them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.values: list[Value] = []
        self._value_of: dict[int, Value] = {}  # by id of what the user's code holds
        self._handles: list[Tensor] = []  # keeps those ids alive
        self._handle_of: dict[int, Tensor] = {}  # by number of the value
        self._groups: dict[int, list[Value]] = {}

    def value(
        self,
        handle: Tensor,
        source: str,
        key: Any,
        tensor: Tensor,
        *,
        known: bool,
        device: torch.device,
        text: str,
        node: Node | None = None,
        alias: Value | None = None,
    ) -> Value:
        """Make a value for what the user's code holds as `handle`."""
        made = Value(len(self.values), source, key, tensor, known, device, len(self.values), text, node, alias)
        if alias is not None:
            made.group = alias.group
        self.values.append(made)
        self._groups.setdefault(made.group, []).append(made)
        self._hold(handle, made)
        return made

    def _hold(self, handle: Tensor, value: Value) -> None:
        self._value_of[id(handle)] = value
        self._handles.append(handle)
        self._handle_of[value.number] = handle

    def batch(self, tensor: Tensor, key: tuple[int | str, int]) -> Tensor:
        """Return what stands for a tensor of the batch."""
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        name = f"argument {key[0]}" if isinstance(key[0], int) else f"argument {key[0]!r}"
        self.value(copy, "batch", key, copy, known=True, device=tensor.device, text=name)
        return copy

    def lift(self, tree: Any) -> Any:
        """Return a structure with the value of each tensor in its place."""

        def leaf(item: Any, path: Path) -> Any:
            if isinstance(item, Tensor):
                return self.of(item)
            self.check_opaque(item)
            return item

        return mapped(leaf, tree)

    def of(self, handle: Tensor) -> Value:
        """Return the value of a tensor; the first time for one that the model holds, a new one."""
        found = self._value_of.get(id(handle))
        if found is not None:
            return found
        kind, name = self.weights.names.get(id(handle), ("constant", ""))
        real = self.weights.real.get(id(handle), handle)
        if kind == "parameter":
            twin = self.weights.meta[id(real)]
            return self.value(handle, kind, name, twin, known=False, device=real.device, text=f"parameter {name!r}")
        if kind == "buffer":
            copy = self.weights.meta[id(real)] if real.is_meta else real.detach().clone()
            return self.value(handle, kind, name, copy, known=True, device=real.device, text=f"buffer {name!r}")
        if handle.is_meta:
            raise SplitError(
                f"{place()}: uses a tensor of shape {tuple(handle.shape)} that comes out of a module by another way "
                "than its result (an attribute, a list, a cache). A recorded stage can't follow it: return it, or name "
                "a module that contains both ends in `units`."
            )
        copy = on_meta(handle) if handle.requires_grad else handle.detach().clone()
        text = f"a tensor of shape {tuple(handle.shape)} held by the model outside of its parameters and buffers"
        return self.value(handle, kind, handle, copy, known=not handle.requires_grad, device=handle.device, text=text)

    def check_opaque(self, item: Any) -> None:
        """Refuse an object that carries tensors between calls where nothing sees them."""
        if plain_function(item) or isinstance(item, nn.Module):
            return
        found = _held_tensor(item, 3, set())
        if found is not None and (found.is_meta or id(found) in self._value_of):
            raise SplitError(
                f"{place()}: a {type(item).__name__} carries tensors from call to call, which a recorded stage can't "
                "follow. Switch that off (for Hugging Face models: use_cache=False), or keep all that use it in one "
                "module named in `units`."
            )

    def handle(self, value: Value) -> Tensor:
        """Return what the user's code holds for a value."""
        return self._handle_of[value.number]

    def group(self, number: int) -> list[Value]:
        """Return all values that share the memory of a group."""
        return self._groups[number]

    def current(self, number: int) -> list[Value]:
        """Return those of a group that the user's code still holds under that value."""
        return [value for value in self._groups[number] if self._value_of[id(self.handle(value))] is value]

    def find(self, item: Any) -> Value | None:
        """Return the value of a tensor, if it has one."""
        return self._value_of.get(id(item)) if isinstance(item, Tensor) else None

    def stand_in(self, value: Value) -> Tensor:
        """Return a value on meta."""
        if not value.known or value.tensor.is_meta:
            return value.tensor
        if value.twin is None:
            value.twin = on_meta(value.tensor)
        return value.twin


def _held_tensor(item: Any, depth: int, seen: set[int]) -> Tensor | None:
    """Return a tensor that an object holds in its attributes, or in containers there."""
    if isinstance(item, Tensor):
        return item
    if depth == 0 or id(item) in seen or plain_function(item) or isinstance(item, nn.Module):
        return None
    seen.add(id(item))
    inner: list[Any] = list(getattr(item, "__dict__", {}).values())
    if isinstance(item, dict):
        inner += list(item.values())
    elif isinstance(item, (list, tuple, set)):
        inner += list(item)
    for one in inner:
        found = _held_tensor(one, depth - (not isinstance(one, (list, tuple, dict))), seen)
        if found is not None:
            return found
    return None
