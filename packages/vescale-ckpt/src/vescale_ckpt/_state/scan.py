"""A live state -> items: walks dicts, lists and tuples, and asks `Stateful` objects for their state_dict, once."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, StateError
from .dtypes import NUMPY_SCALARS
from .items import DEPTH, Item
from .local import Local
from .names import Path, spell
from .values import PRIMITIVE, encode, encode_key, is_primitive, levels

__all__ = ["as_tensor", "dict_tag", "is_stateful", "scan"]


def scan(state: Any) -> Item:
    """Return the items of a state.

    Args:
        state: nested dicts, lists and tuples of tensors, numpy arrays, plain values, `Stateful` objects and `local`s.

    Raises:
        StateError: a cycle, a state nested too deeply, or a value that cannot be saved; the message names the key.

    Example:
        >>> [key for key, _ in scan({"a": 1, "b": [2]}).children]
        ['a', 'b']
    """
    return _Scanner().item(state, (), 0)


def is_stateful(value: Any) -> bool:
    """Tell whether a value gives and takes its state by `state_dict` and `load_state_dict`."""
    if isinstance(value, (type, torch.Tensor)):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def dict_tag(value: Mapping[Any, Any]) -> str | None:
    """Return the tag of a dict in JSON; None for one that is an object as it is."""
    if type(value) is OrderedDict:
        return "$ordered"
    return None if all(type(key) is str and not key.startswith("$") for key in value) else "$dict"


def as_tensor(array: Any, path: Path) -> torch.Tensor:
    """Return a tensor of the elements of a numpy array; it shares memory where torch can.

    Raises:
        StateError: a dtype that is not saved (objects, strings, times, long doubles).
    """
    numpy = sys.modules["numpy"]
    if type(array) is not numpy.ndarray or array.dtype.name not in NUMPY_SCALARS:
        raise StateError(
            f"state: {spell(path)} is a {type(array).__module__}.{type(array).__qualname__} of dtype {array.dtype}. "
            f"Saved are plain arrays of {', '.join(NUMPY_SCALARS)}; convert it to one of those."
        )
    # torch takes neither a foreign byte order nor negative strides, nor strides that are no multiple of the itemsize.
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if odd or not array.dtype.isnative or not array.flags.writeable or not array.flags.aligned:
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array)


class _Scanner:
    def __init__(self) -> None:
        self.open: set[int] = set()
        self.inside_local = False

    def item(self, value: Any, path: Path, depth: int) -> Item:
        if is_primitive(value):
            return Item("value", path, value, value)
        if isinstance(value, torch.Tensor):
            return Item("tensor", path, value)
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            return self._container(value, path, depth)
        if kind is list or kind is tuple:
            if value and set(map(type, value)) <= PRIMITIVE and all(map(is_primitive, value)):
                self._check_depth(path, depth + 2)
                return Item("value", path, value, list(value) if kind is list else {"$tuple": list(value)})
            return self._container(value, path, depth)
        if kind is Local:
            return self._local(value, path, depth)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return Item("numpy", path, value)
        if is_stateful(value):
            return self._container(value, path, depth)
        node = encode(value, path)
        self._check_depth(path, depth + levels(node))
        return Item("value", path, value, node)

    def _container(self, value: Any, path: Path, depth: int) -> Item:
        if id(value) in self.open:
            raise StateError(
                f"state: {spell(path)} is the same object as one that it lies in: a cycle. Save a state that is a tree."
            )
        self.open.add(id(value))
        try:
            kind = type(value)
            if kind is dict or kind is OrderedDict:
                return self._dict(value, path, depth)
            if kind is list or kind is tuple:
                inner = depth + (1 if kind is list else 2)
                self._check_depth(path, inner)
                children = [(n, self.item(child, (*path, n), inner)) for n, child in enumerate(value)]
                return Item(kind.__name__, path, value, children=children)
            self._check_depth(path, depth + 1)
            given = self._asked(value, path)
            return Item("stateful", path, value, children=[(None, self.item(given, path, depth + 1))])
        finally:
            self.open.remove(id(value))

    @staticmethod
    def _asked(value: Any, path: Path) -> Any:
        try:
            return value.state_dict()
        except CheckpointError:
            raise
        except Exception as error:
            raise StateError(
                f"state: {spell(path)}: state_dict of this {type(value).__qualname__} failed: "
                f"{type(error).__name__}: {error}."
            ) from error

    def _dict(self, value: dict[Any, Any], path: Path, depth: int) -> Item:
        tag = dict_tag(value)
        inner = depth + (1 if tag is None else 3)
        self._check_depth(path, inner)
        children = []
        for key, child in value.items():
            if type(key) is not str or not key.isascii():
                self._check_depth(path, depth + 2 + levels(encode_key(key, path)))
            children.append((key, self.item(child, (*path, key), inner)))
        return Item("ordered" if tag == "$ordered" else "dict", path, value, children=children)

    def _local(self, value: Local, path: Path, depth: int) -> Item:
        # Its JSON stands elsewhere, but the stack of calls is the same.
        self._check_depth(path, depth + 1)
        if self.inside_local:
            return self.item(value.value, path, depth + 1)
        self.inside_local = True
        try:
            return Item("local", path, value, children=[(None, self.item(value.value, path, depth + 1))])
        finally:
            self.inside_local = False

    def _check_depth(self, path: Path, depth: int) -> None:
        if depth > DEPTH:
            raise StateError(
                f"state: {spell(path)} is nested too deeply: {depth} levels of JSON, where {DEPTH} are allowed. Save a "
                f"flatter state."
            )
