"""What a region reads besides its arguments and tensors: attributes of modules, and variables of its functions.

A program has their values in its text, so each call looks whether they are still the same objects: numbers in modules
and in what these hold (lists, dicts, configurations), variables of closures, and globals. Functions of torch and of
this package are trusted to have none that change.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Surroundings", "value_key"]

MOST = 256
"""Entries of a container that are looked at; of larger ones only their number is."""
DEEPEST = 4
"""How far containers in containers, and functions that functions call, are followed."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_OPAQUE = (Tensor, nn.Module, type, types.ModuleType, types.MethodType, types.BuiltinFunctionType)
"""What is told apart by which object it is, and not looked into."""
_TRUSTED = ("torch", "vescale_dtensor")


@dataclass(slots=True)
class _Source:
    """A container, and how to read it."""

    container: Any
    """A dict, list, tuple, set, or None where it has no size."""
    name: str
    """Of it."""
    keys: tuple[str, ...] | None
    """Of the entries that are read; None: all, by position."""
    read: Callable[[], tuple[Any, ...]]
    """Returns the entries."""
    table: dict[Any, Any] | None = None
    """Where `keys` are; None: they are no keys."""


class Surroundings:
    """Values that decide what a region does.

    Args:
        modules: all of the region.
        functions: that it calls, besides the modules; those of the same file that these call are found.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any]) -> None:
        self._sources: list[_Source] = []
        self._seen: set[int] = set()
        for module in modules:
            self._seen.add(id(module.__dict__))
            self._add_table(module.__dict__, type(module).__name__, 0)
        classes = dict.fromkeys(type(module) for module in modules)
        for function, owner in [(f, None) for f in functions] + [(cls.forward, cls) for cls in classes]:
            self._add_function(function, owner or type(getattr(function, "__self__", None)), 0)
        self._sources.sort(key=lambda source: source.table is None)
        tables = [source for source in self._sources if source.table is not None]
        self._tables: list[Any] = [source.table for source in tables for _ in source.keys or ()]
        self._keys = [key for source in tables for key in source.keys or ()]
        self._rest = [source.read for source in self._sources if source.table is None]
        self._readers = [source.read for source in self._sources]
        self._sized = [source.container for source in self._sources if source.container is not None]

    def values(self) -> list[Any]:
        """Return the values; KeyError where one is gone."""
        return list(itertools.chain.from_iterable([read() for read in self._readers]))

    def sizes(self) -> list[int]:
        """Return how many entries the containers have."""
        return list(map(len, self._sized))

    def same(self, values: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether all values are the same objects as before, and no container grew or shrank."""
        try:
            if not all(map(operator.is_, map(operator.getitem, self._tables, self._keys), values)):
                return False
        except KeyError:
            return False
        if self._rest:
            now = list(itertools.chain.from_iterable([read() for read in self._rest]))
            before = values[len(self._keys) :]
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return self.sizes() == sizes

    def changed(self, values: Sequence[Any], sizes: Sequence[int]) -> str | None:
        """Name what is another object than before, or grew or shrank; None: nothing."""
        sized = [source for source in self._sources if source.container is not None]
        for source, before in zip(sized, sizes, strict=True):
            if len(source.container) != before:
                return source.name
        rest = iter(values)
        for source in self._sources:
            try:
                entries = source.read()
            except KeyError as error:
                return f"{source.name}.{error.args[0]}"
            for number, entry in enumerate(entries):
                if entry is not next(rest):
                    return source.name if source.keys is None else f"{source.name}.{source.keys[number]}"
        return None

    def name_of(self, value: Any) -> str | None:
        """Name what has a value; None: nothing has, or there is no value."""
        if value is None:
            return None
        for source in self._sources:
            for number, entry in enumerate(source.read()):
                if entry is value:
                    return source.name if source.keys is None else f"{source.name}.{source.keys[number]}"
        return None

    # -- what there is to read

    def _add_table(self, table: dict[Any, Any], name: str, depth: int, keys: Iterable[str] | None = None) -> None:
        """Add the entries of a dict: some of them, as of globals, or all."""
        sized = table if keys is None else None
        if keys is None:
            keys = [k for k in table if k not in _INTERNAL] if len(table) <= MOST else []
        chosen = tuple(k for k in keys if depth or sized is None or not isinstance(table[k], Tensor))
        if chosen or sized is not None:
            self._sources.append(_Source(sized, name, chosen, _reader(table, chosen), table))
        for key in chosen:
            self._follow(table[key], f"{name}.{key}", depth + 1)

    def _follow(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or type(value) in _PLAIN or depth > DEEPEST or id(value) in self._seen:
            return
        if isinstance(value, types.FunctionType):
            self._add_function(value, type(None), depth)
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self._add_table(value, name, depth)
        elif isinstance(value, list | tuple | set | frozenset):
            few = len(value) <= MOST
            if isinstance(value, list | set):  # others cannot change
                read = functools.partial(tuple, value) if few else tuple
                self._sources.append(_Source(value, name, None, read))
            for entry in value if few else ():
                self._follow(entry, name, depth + 1)
        elif not _is_trusted(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            self._add_table(value.__dict__, name, depth)

    def _add_function(self, function: Any, owner: type, depth: int) -> None:
        """Add the variables of a function, and of those of the same file or class that it may call."""
        function = inspect.unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or _is_trusted(function) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        code, table = function.__code__, function.__globals__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add_cell(cell, variable, depth)
        chosen = []
        for name in dict.fromkeys(_names(code)):
            value = table.get(name)
            method = inspect.getattr_static(owner, name, None)
            if isinstance(method, types.FunctionType) and depth < DEEPEST:
                self._add_function(method, owner, depth + 1)
            if isinstance(value, types.FunctionType):
                if value.__module__ == function.__module__ and depth < DEEPEST:
                    self._add_function(value, type(None), depth + 1)
            elif name in table and (type(value) in _PLAIN or isinstance(value, list | tuple | dict | set | Tensor)):
                chosen.append(name)
        self._add_table(table, function.__name__, depth, chosen)

    def _add_cell(self, cell: types.CellType, name: str, depth: int) -> None:
        if id(cell) in self._seen:
            return
        self._seen.add(id(cell))

        def read() -> tuple[Any, ...]:
            try:
                return (cell.cell_contents,)
            except ValueError:  # not assigned yet
                return (_EMPTY,)

        self._sources.append(_Source(None, name, None, read))
        self._follow(read()[0], name, depth + 1)


_EMPTY = object()


def _reader(table: dict[str, Any], keys: tuple[str, ...]) -> Callable[[], tuple[Any, ...]]:
    if not keys:
        return tuple
    if len(keys) == 1:
        (key,) = keys
        return lambda: (table[key],)
    return functools.partial(operator.itemgetter(*keys), table)


def _is_trusted(thing: Any) -> bool:
    top = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return top in _TRUSTED or (top in sys.stdlib_module_names and thing not in (types.SimpleNamespace, Namespace))


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes that a function and those inside of it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def value_key(value: Any) -> Any:
    """Return what tells a value from others: its type and itself, or which object it is."""
    if type(value) not in _PLAIN:
        return id(value)
    return type(value), repr(value) if isinstance(value, float | complex) else value  # -0.0 == 0.0, and nan != nan
