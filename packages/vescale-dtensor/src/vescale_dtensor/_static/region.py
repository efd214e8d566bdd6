"""`static`: a function or module whose calls run recorded programs where one fits, and dynamically where none does.

A signature is recorded in its first two calls, which run dynamically; only if both records give the same program is
it used. So Python that decides by values is found out: by its reads of tensors, or by a record that differs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .. import _random
from .._dispatch.engine import label_one
from .._tensor import DTensor
from ..errors import DTensorError, StaticWarning
from .program import Program, Unwritable, write
from .recorder import Recorder
from .signature import Held, NoKey, arguments_key, modes_key

__all__ = ["Region", "static"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True)
class _Record:
    """What is known of one signature."""

    calls: int = 0
    """Calls that were recorded."""
    source: str = ""
    """Of the first record."""
    program: Program | None = None
    """What to run; None: not yet, or never."""
    tree: TreeSpec | None = None
    """Of the result."""
    leaves: list[Any] | None = None
    """Of the result; tensors are None."""
    reason: str | None = None
    """Why calls of this signature stay dynamic."""


class Region:
    """A function with its recorded programs.

    Args:
        function: what to run.
        modules: whose parameters and buffers it uses.
        name: for messages.
        limit: signatures that are recorded at most.
    """

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module], name: str, limit: int) -> None:
        self.function, self.name = function, name
        self._held = Held(modules)
        _random.provider()  # asked for now, lest the first call have a signature of its own
        self._limit = limit
        self._records: dict[Any, _Record] = {}
        self._said: list[str] = []
        self._inside = False
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not torch._C._is_torch_function_enabled() or torch._C._len_torch_function_stack():
            return self.function(*args, **kwargs)  # inside of another region, or under a mode that wants to see all
        inputs: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            try:
                key: Any = arguments_key(args, kwargs, inputs)
            except NoKey as error:
                self._say(f"it has {error}")
                key = None
            if key is not None:
                if self._held.refresh():
                    self._records.clear()
                held = self._held.tensors()
                key = (key, self._held.state(held), modes_key())
        if key is None:
            return self.function(*args, **kwargs)
        record = self._records.get(key)
        if record is None:
            if len(self._records) >= self._limit:
                self._say(
                    f"it was called with {self._limit} kinds of arguments, as many as are recorded; pass a larger "
                    "limit, or fewer different shapes and values"
                )
                return self.function(*args, **kwargs)
            record = self._records[key] = _Record()
        if record.program is not None:
            return _run(record, held, inputs)
        if record.reason is not None:
            return self.function(*args, **kwargs)
        return self._record(record, args, kwargs, held, inputs)

    def _record(
        self, record: _Record, args: Any, kwargs: dict[str, Any], held: list[Tensor], inputs: list[Tensor]
    ) -> Any:
        hooked = self._held.hooked
        if hooked is not None:
            record.reason = f"{hooked} inside has hooks, which a program would not call"
            self._say(record.reason)
            return self.function(*args, **kwargs)
        before = [dict(m.__dict__) for m in self._held.modules]
        recorder = Recorder([*held, *inputs])
        self._inside = True
        recorder.start()
        try:
            with recorder:
                result = self.function(*args, **kwargs)
        finally:
            recorder.stop()
            self._inside = False
        record.calls += 1
        try:
            self._finish(record, recorder, held, inputs, result, before)
        except Unwritable as error:
            record.reason = str(error)
        if record.reason is not None:
            self._say(record.reason)
        return result

    def _finish(
        self,
        record: _Record,
        recorder: Recorder,
        held: list[Tensor],
        inputs: list[Tensor],
        result: Any,
        before: list[dict[str, Any]],
    ) -> None:
        if recorder.reason is not None:
            record.reason = recorder.reason
            return
        for module, old in zip(self._held.modules, before, strict=True):
            changed = [n for n, v in module.__dict__.items() if n not in old or old[n] is not v]
            if changed:
                raise Unwritable(f"{type(module).__name__}.{changed[0]} is assigned to")
        leaves, tree = tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise Unwritable("it returns no tensor")
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and type(leaf) not in _PLAIN:
                raise Unwritable(f"it returns a {type(leaf).__name__}")
        program = write(recorder, inputs, held, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if record.calls == 1:
            record.source = program.source
            return
        if program.source != record.source:
            raise Unwritable(f"two calls did different things: {_difference(record.source, program.source)}")
        record.program, record.tree = program, tree
        record.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _say(self, reason: str) -> None:
        if reason in self._said:
            return
        self._said.append(reason)
        warnings.warn(f"static: {self.name} runs dynamically: {reason}.", StaticWarning, stacklevel=3)

    def code(self) -> str:
        """Return the programs as Python, with what they are for."""
        known = [record.reason for record in self._records.values()]
        parts = [f"# {self.name}: dynamic: {reason}" for reason in self._said if reason not in known]
        for number, record in enumerate(self._records.values()):
            title = f"# {self.name}, signature {number}"
            if record.program is not None:
                parts.append(f"{title}\n{record.program.source}")
            else:
                why = record.reason or f"recorded {record.calls} of 2 times"
                parts.append(f"{title}: dynamic: {why}")
        return "\n\n".join(parts) or f"# {self.name}: not called yet"

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        roots = [copy.deepcopy(m, memo) for m in self._held._roots]
        function = self.function
        owner = getattr(function, "__self__", None)
        if owner is not None:
            function = getattr(type(owner), function.__name__).__get__(copy.deepcopy(owner, memo))
        return Region(function, roots, self.name, self._limit)

    def __reduce__(self) -> Any:
        raise DTensorError(f"{self.name} is static, and its programs cannot be pickled; save its state_dict() instead.")


_TENSOR = object()


def _run(record: _Record, held: list[Tensor], inputs: list[Tensor]) -> Any:
    program, leaves = record.program, record.leaves
    assert program is not None
    assert leaves is not None
    assert record.tree is not None
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunctionSubclass():
        try:
            made = program.run(*held, *inputs)
        finally:
            if program.switches:
                torch._C._set_grad_enabled(before)
        labelled = [t if spec is None else _labelled(t, spec) for t, spec in zip(made, program.specs, strict=True)]
    if record.tree.is_leaf():
        return labelled[0]
    rest = iter(labelled)
    return tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in leaves], record.tree)


def _labelled(tensor: Tensor, spec: Any) -> Tensor:
    if tensor.__class__ is Tensor:
        tensor.__class__ = DTensor
        tensor._spec = spec  # type: ignore[attr-defined]
        return tensor
    return label_one(tensor, spec)


def _difference(one: str, other: str) -> str:
    for a, b in zip(one.splitlines(), other.splitlines(), strict=False):
        if a != b:
            return f"{a.strip()!r} and {b.strip()!r}"
    return "one is longer"


def static(module_or_function: Any, *, modules: Sequence[nn.Module] = (), limit: int = 16) -> Any:
    """Record what a module or function does on local tensors, and repeat it without deciding anything again.

    The first two calls with a signature (layouts, shapes, dtypes and `requires_grad` of tensors, plain values, train
    or eval, modes of torch) run dynamically and are recorded; later ones run the program. Where a call cannot be
    repeated blindly, it stays dynamic, and a warning says why: values of tensors that Python reads, attributes of
    modules that are assigned, hooks on modules inside, tensors from elsewhere.

    Args:
        module_or_function: a module, whose `forward` is replaced in place, or a function.
        modules: for a function, the modules that it uses; those that it refers to are found.
        limit: how many signatures are recorded; others stay dynamic.

    Returns:
        The module, or a function in place of the one that was given. Both have `static_code()`, which returns the
        programs as Python.

    Raises:
        TypeError: neither a module nor a function.

    >>> double = static(lambda x: x + x)
    >>> [int(double(torch.tensor(n))) for n in range(3)]
    [0, 2, 4]
    >>> print(double.static_code())
    # <lambda>, signature 0
    def program(x0):
        t0 = add(x0, x0)
        return (t0, )
    """
    if isinstance(module_or_function, nn.Module):
        module = module_or_function
        if isinstance(module.forward, Region):
            raise TypeError(f"module_or_function: {type(module).__name__} is static already")
        region = Region(module.forward, [module], type(module).__name__, limit)
        module.forward = region
        module.static_code = region.code  # type: ignore[assignment]
        return module
    if not callable(module_or_function):
        raise TypeError(f"module_or_function: expected a module or a function, got {type(module_or_function).__name__}")
    name = getattr(module_or_function, "__qualname__", type(module_or_function).__name__).rpartition("<locals>.")[2]
    region = Region(module_or_function, [*modules, *_modules_of(module_or_function)], name, limit)
    region.static_code = region.code  # type: ignore[attr-defined]
    return region


def _modules_of(function: Any) -> list[nn.Module]:
    """Find the modules that a function refers to: by its closure, its defaults, its globals, or as its owner."""
    found = [getattr(function, "__self__", None)]
    try:
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    except TypeError:
        found += list(vars(function).values()) if hasattr(function, "__dict__") else []
    if isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values(), *_modules_of(function.func)]
    return [value for value in found if isinstance(value, nn.Module)]
