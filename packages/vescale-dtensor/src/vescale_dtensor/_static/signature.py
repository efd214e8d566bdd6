"""What decides whether a recorded program fits a call: the inputs, the modules, and the modes of torch.

Everything is read with dispatch off, where a tensor's metadata are local and cheap.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import _has_any_global_hook as _any_global_hook

from .. import _random
from .._dispatch.policy import state as _policy
from .._tensor import DTensor
from .surroundings import Surroundings, value_key
from .unchanged import Metadata

_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]
_stride, _num_elements = Tensor.stride, Tensor.numel  # together they tell shapes apart, and are cheaper

__all__ = [
    "Held",
    "NoKey",
    "arguments_key",
    "foreign_global_hook",
    "modes_key",
    "python_generators",
    "shared_tensors",
    "watched",
]

_TENSORS = (DTensor, Tensor, nn.Parameter)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format)
_KEPT = 256
"""States of modules that are told apart; more are forgotten, and recorded anew."""
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
        if cls not in _TENSORS and _has_own_operators(cls):
            raise NoKey(f"a tensor of type {cls.__name__}, which has operators of its own")
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
        return value_key(value)
    raise NoKey(f"an argument of type {cls.__name__}")


def shared_tensors(inputs: Sequence[Tensor], held: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return which inputs are which of the tensors that modules hold."""
    given = {id(tensor): number for number, tensor in enumerate(inputs)}
    return tuple([(given[id(t)], number) for number, t in enumerate(held) if id(t) in given]) if given else ()


def _has_own_operators(cls: type[Tensor]) -> bool:
    """Whether a class of tensors does something else than torch, where Python sees it."""
    function = cls.__torch_function__
    standard = Tensor.__torch_function__
    return function is not torch._C._disabled_torch_function_impl and getattr(
        function, "__func__", None
    ) is not getattr(standard, "__func__", standard)


def watched() -> bool:
    """Whether a transform of functions, fake tensors or a global hook want to see every call."""
    return bool(
        torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE))
        or foreign_global_hook()
    )


def foreign_global_hook() -> bool:
    """Whether a hook on all modules is not of this package, whose `explain` and `static_eager` only look on."""
    if not _any_global_hook():  # type: ignore[no-untyped-call]
        return False
    tables = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_backward_pre_hooks,
        module_hooks._global_backward_hooks,
    )
    owners = [type(getattr(hook, "__self__", None)) for table in tables for hook in table.values()]
    return not all(owner.__module__.startswith("vescale_dtensor") for owner in owners)


def python_generators() -> Any:
    """Return where the global generators of Python, and of NumPy where it is there, stand."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), state and (state[1].tobytes(), state[2:])


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what of a tensor decides what a program does with it; with dispatch off."""
    spec = tensor._spec if tensor.__class__ is DTensor else tensor.shape
    gradients = tensor.requires_grad and (2 if tensor.is_leaf else 1)
    return spec, tensor.dtype, tensor.stride(), gradients, tensor.device, tensor.is_conj(), tensor.is_neg()


def modes_key() -> tuple[Any, ...]:
    """Return the modes of torch and of this package that change what operators do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        _policy.communication,
        _random.state.mode,
        id(_random.state.token),
    )


class Held:
    """What the modules of a region hold: their tensors, and what else a program depends on.

    Args:
        modules: the outermost modules; those inside of them count too.
        function: what the region runs.
    """

    def __init__(self, modules: Iterable[nn.Module], function: Any) -> None:
        self._roots, self._function = list(modules), function
        self._children: list[int] | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._tables: list[dict[str, Any]] = []
        self._types: set[type] = set()
        self._strange: type | None = None
        self._last: tuple[Any, int] | None = None
        self._known: tuple[list[int], Metadata, int, tuple[int, int]] | None = None
        """Of the last call: which tensors there were, what they were, how many hooks modules had, and its state."""
        self._addresses: frozenset[int] = frozenset()
        """Of those tensors."""
        self._around = -1
        self.last_change: str | None = None
        """Name of what was another one in a call than in the one before."""
        self._values: list[Any] = []
        self._sizes: list[int] = []
        self._fresh = itertools.count()
        self._numbers: dict[Any, int] = {}
        self._objects: dict[Any, list[Any]] = {}

    def _read(self) -> None:
        self.modules = list(dict.fromkeys(m for root in self._roots for m in root.modules()))
        self._known = None
        self._tables = [m._modules for m in self.modules]
        self._inner = [m for table in self._tables for m in table.values()]
        self._children = self._child_ids()
        self._hooks = [getattr(m, name) for m in self.modules for name in _HOOKS]
        self._slots = []
        seen: set[int] = set()
        for module in self.modules:
            for table in _tables_of(module):
                for name, value in table.items():
                    if isinstance(value, Tensor) and id(value) not in seen:
                        seen.add(id(value))
                        self._slots.append((table, name))
        self._slot_tables, self._slot_names = [t for t, _ in self._slots], [n for _, n in self._slots]
        self._types = set(map(type, self.tensors()))
        self._strange = next((t for t in self._types if t not in _TENSORS and _has_own_operators(t)), None)
        self._num_held = self._count_held()
        self._surroundings = Surroundings(self.modules, [self._function])
        self._values, self._sizes = self._surroundings.values(), self._surroundings.sizes()
        key = tuple(map(value_key, self._values))
        if not all(map(_is_kept, self._objects.get(key, ()), self._values)):
            del self._numbers[key]  # a tensor has the address of one that is gone
        self._around = self._number(key)
        # Lest another object get the address of one that is gone. But tensors are large.
        self._objects[key] = [weakref.ref(v) if isinstance(v, Tensor) else v for v in self._values]

    def _number(self, key: Any) -> int:
        if key not in self._numbers and len(self._numbers) >= _KEPT:
            self._numbers.clear()
            self._objects.clear()
        if key not in self._numbers:
            self._numbers[key] = next(self._fresh)
        return self._numbers[key]

    def _child_ids(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable([table.values() for table in self._tables])))

    def tensors(self) -> list[Tensor]:
        """Return the tensors, each once; in the same order as long as `refresh` returns False."""
        return [table[name] for table, name in self._slots]

    def unchanged(self) -> tuple[list[Tensor], tuple[int, int]] | None:
        """Return the tensors and the numbers of `state` if all is as when it was asked; None: it may not be."""
        if self._known is None:
            return None
        ids, metadata, num_hooks, numbers = self._known
        try:
            tensors: list[Tensor] = list(map(operator.getitem, self._slot_tables, self._slot_names))
        except KeyError:
            return None
        if list(map(id, tensors)) != ids or not metadata.same(tensors):
            return None
        inner = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        if len(inner) != len(self._inner) or not all(map(operator.is_, inner, self._inner)):
            return None
        if sum(map(len, self._hooks)) != num_hooks or not self._surroundings.same(self._values, self._sizes):
            return None
        return tensors, numbers

    def lacks(self, inputs: Sequence[Tensor]) -> bool:
        """Whether none of some inputs is one of the tensors that `unchanged` returns."""
        return self._addresses.isdisjoint(map(id, inputs))

    def captured(self, inputs: Sequence[Tensor]) -> str | None:
        """Name a variable that is one of the inputs: a record could not tell the two apart; None: there is none."""
        given = set(map(id, inputs))
        return self._surroundings.name_of(next((v for v in self._values if id(v) in given), None))

    def refresh(self) -> bool:
        """Look at the modules anew where something changed, and tell whether `tensors` returns others, or more."""
        types = set(map(type, [table.get(name) for table, name in self._slots]))
        known = types <= self._types
        same_modules = self._child_ids() == self._children and (known or all(issubclass(t, Tensor) for t in types))
        if same_modules and known and self._surroundings.same(self._values, self._sizes):
            return False
        if self._children is not None:
            self.last_change = self._surroundings.changed(self._values, self._sizes)
        before = [(id(table), name) for table, name in self._slots]
        self._read()
        return not same_modules or before != [(id(table), name) for table, name in self._slots]

    def changed(self, tensors: Sequence[Tensor]) -> str | None:
        """Name what a call assigned to: not the same as at the last `refresh`; None: nothing."""
        name = self._surroundings.changed(self._values, self._sizes)
        if name is not None:
            return name
        for (table, key), tensor in zip(self._slots, tensors, strict=True):
            if table.get(key) is not tensor:
                return next((f"{type(m).__name__}.{key}" for m in self.modules if table in _tables_of(m)), key)
        before = self._num_held, self._children
        return "a module" if before != (self._count_held(), self._child_ids()) else None

    def _count_held(self) -> list[int]:
        return [len(table) for m in self.modules for table in (m._parameters, m._buffers)]

    @property
    def hooked(self) -> str | None:
        """Name a module that the function calls and that has hooks of the user; None if none has."""
        caller = getattr(self._function, "__self__", None)  # its own hooks are called around the region
        caller = caller if getattr(self._function, "__name__", "") == "forward" else None
        for module in self.modules:
            if module is caller:
                continue
            for name in _HOOKS:
                for hook in getattr(module, name).values():
                    if not type(hook).__module__.startswith("vescale_dtensor"):
                        return type(module).__name__
        return None

    def state(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Return numbers for what of the modules decides which program fits: equal ones, equal state."""
        if self._strange is not None:
            raise NoKey(f"a tensor of type {self._strange.__name__}, which has operators of its own")
        now = (
            list(map(id, tensors)),
            list(map(_requires_grad, tensors)),
            list(map(_dtype, tensors)),
            list(map(_stride, tensors)),
            list(map(_num_elements, tensors)),
            sum(map(len, self._hooks)),
        )
        last = self._last
        if last is not None and now == last[0]:
            if self._known is None:
                self._addresses = frozenset(now[0])
                self._known = now[0], Metadata(tensors), now[5], (last[1], self._around)
            return last[1], self._around
        # Only tensors that were put in place of others need a closer look, for their layouts.
        number = self._number((tuple([tensor_key(t) for t in tensors]), now[5]))
        self._last, self._known = (now, number), None
        return number, self._around


def _is_kept(kept: Any, value: Any) -> bool:
    return kept() is value if isinstance(value, Tensor) else kept is value


def _tables_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module.__dict__
