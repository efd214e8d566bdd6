"""Descriptions of tensors: what a record has in place of them, so that their memory is free as early as without one.

An object of Python is told from a later one at the same address by a weak reference, and so is memory: a weak reference
to a storage lets go of the data, but nothing else gets its address as long as it is held.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .watch import memory_of

__all__ = ["Value", "Values", "described", "returned", "values_of"]


class Value:
    """A tensor of a recorded call, without its data; a new one stands for a tensor that only a pass makes."""

    __slots__ = ("_first", "constant", "given", "known", "leaf", "memory", "requires_grad")

    def __init__(self) -> None:
        self._first: Value | None = None
        self.known = False
        """Whether a program can have it: it was given, or a step made it."""
        self.requires_grad = False
        self.leaf = True
        """Whether it has no node in autograd's graph; as that and what it requires were when it was used last."""
        self.memory = 0
        """What tensors that share memory have in common."""
        self.given: Tensor | None = None
        """The tensor, if the program is called with it."""
        self.constant: Tensor | None = None
        """The tensor, as long as it may be the same in every call (see `fold`)."""

    @property
    def first(self) -> Value:
        """The first object for the same value."""
        return self if self._first is None else self._first

    @first.setter
    def first(self, other: Value) -> None:
        self._first = None if other is self else other  # not itself: who records must not wait for the collector

    @property
    def has_graph(self) -> bool:
        """Whether autograd's graph has a node for it."""
        return self.requires_grad and not self.leaf


class Values:
    """The values of all tensors that a call was seen to use, by object."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        self.memory: dict[int, StorageWeakRef | Tensor] = {}
        """Where they lie or lay, and what keeps that number from being given to others."""

    def find(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor; None: it was never looked at."""
        found = self._found.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def look(self, tensor: Tensor) -> Value:
        """Return the value of a tensor as it is now."""
        value = self.find(tensor)
        if value is None:
            value = Value()
            self._found[id(tensor)] = weakref.ref(tensor), value
        with torch._C.DisableTorchFunction():  # a recorder must not see it
            value.requires_grad, value.leaf = tensor.requires_grad, tensor.is_leaf
            value.memory = memory_of(tensor)
            if value.memory not in self.memory:
                strided = tensor.layout is torch.strided
                self.memory[value.memory] = StorageWeakRef(tensor.untyped_storage()) if strided else tensor  # type: ignore[no-untyped-call]
        return value


def described(value: Any, values: Values) -> Any:
    """Return a copy of nested containers with values in place of tensors: later changes of lists do not change it.

    What is not of Python's own types stays as it is, with its tensors: there is no spelling for it.
    """
    if isinstance(value, Tensor):
        return values.look(value)
    if type(value) is list:
        return [described(v, values) for v in value]
    if type(value) is tuple:
        return tuple([described(v, values) for v in value])
    if type(value) is dict:
        return {k: described(v, values) for k, v in value.items()}
    if type(value) is slice:
        return slice(*[described(v, values) for v in (value.start, value.stop, value.step)])
    return value


def returned(result: Any, values: Values) -> Any:
    """Return a result as plain containers, with values in place of tensors, and nothing in place of all else."""
    if isinstance(result, Tensor):
        return values.look(result)
    if isinstance(result, list | tuple):
        return [returned(r, values) for r in result]
    if isinstance(result, dict):
        return {k: returned(r, values) for k, r in result.items()}
    return None


def values_of(value: Any) -> list[Value]:
    """All values in nested lists, tuples, dicts and slices."""
    found: list[Value] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, Value):
            found.append(one)
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif isinstance(one, dict):
            stack.extend(reversed(one.values()))
        elif isinstance(one, slice):
            stack.extend((one.step, one.stop, one.start))
    return found
