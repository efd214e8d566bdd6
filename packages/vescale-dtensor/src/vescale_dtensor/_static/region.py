"""Regions: functions whose calls run recorded programs where one fits, and dynamically where none does.

A signature is recorded in its first two calls, which run dynamically; only if both records give the same program is
it used. So Python that decides by values is found out: by its reads of tensors, or by a record that differs.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _random
from .._dispatch.engine import label_one
from .._tensor import DTensor
from ..errors import DTensorError, StaticWarning
from .constants import differs
from .passes import Settings
from .program import Program, Unwritable, write
from .recorder import Recorder
from .results import Shape, Shapeless
from .signature import (
    Held,
    NoKey,
    arguments_key,
    foreign_global_hook,
    modes_key,
    python_generators,
    shared_tensors,
    watched,
)
from .unchanged import Arguments

__all__ = ["Region"]

_PATIENCE = 3
"""Calls in which something may be assigned, as at a start, before that is worth a word."""


@dataclass(slots=True)
class _Record:
    """What is known of one signature."""

    program: Program | None = None
    """What to run; None: not yet, or never."""
    first: Program | None = None
    """Of the first record."""
    shape: Shape | None = None
    """Of the result."""
    reason: str | None = None
    """Why calls of this signature stay dynamic."""
    arguments: Arguments | None = None
    """Of a call that had it; None: none had arguments that can be compared."""
    situation: Any = None
    """State of the modules, and modes of torch and of this package, in that call."""


class Region:
    """A function with its recorded programs.

    Args:
        function: what to run.
        modules: whose parameters and buffers it uses.
        name: for messages.
        limit: signatures that are recorded at most.
        settings: passes over the records.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[nn.Module], name: str, limit: int, settings: Settings
    ) -> None:
        self.function, self.name, self.settings = function, name, settings
        self._held = Held(modules, function)
        _random.provider()  # asked for now, lest the first call have a signature of its own
        self._limit = limit
        self._records: dict[Any, _Record] = {}
        self._recent: _Record | None = None
        """Whose program ran last."""
        self._said: list[str] = []
        self._assigned = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = torch._C._len_torch_function_stack()
        if not torch._C._is_torch_function_enabled():
            return self.function(*args, **kwargs)  # inside of another region
        if (modes and not _onlookers()) or watched():
            self._say_who_looks()
            return self.function(*args, **kwargs)
        inputs: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            recent = self._recent
            if recent is not None and not modes:
                tensors = self._fitting(recent, args, kwargs)
                if tensors is not None:
                    return _run(recent, tensors)
            try:
                key: Any = arguments_key(args, kwargs, inputs)
                if self._held.refresh():
                    self._records.clear()
                    self._recent = None
                held = self._held.tensors()
                situation, shared = (self._held.state(held), modes_key()), shared_tensors(inputs, held)
                key = (key, situation, shared)
            except NoKey as error:
                self._say(f"it has {error}")
                key = None
        if key is None:
            return self.function(*args, **kwargs)
        record = self._records.get(key)
        if modes and (record is None or record.program is None):  # what looks on is no part of a record
            return self.function(*args, **kwargs)
        if record is None:
            if len(self._records) >= self._limit:
                self._say(self._too_many())
                return self.function(*args, **kwargs)
            record = self._records[key] = _Record()
        if record.program is not None:
            if modes:
                for mode in _onlookers():
                    mode.program_runs(self.name, record.program.notes)
            if record.arguments is None and not shared and Arguments.possible(args, kwargs):
                record.arguments, record.situation = Arguments(args, kwargs), situation
            self._recent = record
            with torch._C.DisableTorchFunctionSubclass():
                return _run(record, [*held, *inputs])
        if record.reason is not None:
            return self.function(*args, **kwargs)
        return self._record(key, record, args, kwargs, held, inputs)

    def _fitting(self, record: _Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Return what the program of a record takes, if a call is like one that had it; None: it may not be."""
        if record.arguments is None:
            return None
        inputs = record.arguments.tensors_of(args, kwargs)
        if inputs is None or not self._held.lacks(inputs):
            return None
        found = self._held.unchanged()
        if found is None or record.situation != (found[1], modes_key()):
            return None
        return found[0] + inputs

    def _record(
        self, key: Any, record: _Record, args: Any, kwargs: dict[str, Any], held: list[Tensor], inputs: list[Tensor]
    ) -> Any:
        hooked = self._held.hooked
        if hooked is not None:
            record.reason = f"{hooked} inside has hooks, which a program would not call"
            self._say(record.reason)
            return self.function(*args, **kwargs)
        generators = python_generators()
        recorder = Recorder([*held, *inputs])
        recorder.start()
        try:
            with recorder:
                result = self.function(*args, **kwargs)
        finally:
            recorder.stop()
        changed = self._held.changed(held)
        if changed is not None and recorder.reason is None:
            self._assigns(key, changed)
            return result
        self._assigned = 0
        try:
            if python_generators() != generators:
                recorder.reason = recorder.reason or "it draws random numbers from Python or NumPy"
            variable = self._held.captured(inputs)
            if variable is not None:
                recorder.reason = (
                    recorder.reason
                    or f"its argument is also the variable {variable}, which a record could not tell apart"
                )
            if not _same_arguments(key[0], args, kwargs, inputs):
                recorder.reason = recorder.reason or "it changes a list or dict that it is given"
            self._finish(record, recorder, held, inputs, result)
        except (Unwritable, Shapeless) as error:
            record.reason = str(error)
        if record.reason is not None:
            record.first = record.shape = None
            self._say(record.reason)
        return result

    def _too_many(self) -> str:
        changes = self._held.last_change
        also = f", and leave {changes}, which changed last, as it is" if changes is not None else ""
        return (
            f"it was called with {self._limit} kinds of arguments, as many as are recorded; pass a larger limit, or "
            f"fewer different shapes and values{also}"
        )

    def _assigns(self, key: Any, name: str) -> None:
        """Forget a record in which something was assigned, as in a first call; if it goes on, say so."""
        self._records.pop(key, None)
        self._assigned += 1
        if self._assigned >= _PATIENCE:
            self._say(f"{name} is assigned to")

    def _finish(
        self, record: _Record, recorder: Recorder, held: list[Tensor], inputs: list[Tensor], result: Any
    ) -> None:
        if recorder.reason is not None:
            record.reason = recorder.reason
            return
        shape = Shape(result)
        if not shape.tensors:
            raise Unwritable("it returns no tensor")
        program = write(recorder, inputs, held, shape.tensors, self.settings)
        shape.forget()  # or the graph of this call lives until the next one
        first, before = record.first, record.shape
        if first is None or before is None:
            record.first, record.shape = program, shape
            return
        if program.source != first.source:
            raise Unwritable(f"two calls did different things: {_difference(first.source, program.source)}")
        name = differs(first.run.__globals__, program.run.__globals__)
        if name is not None:
            raise Unwritable(f"two calls did different things: {name} was another object")
        if shape.key() != before.key() or shape.shares(before):
            raise Unwritable("two calls returned different things besides tensors")
        if self.settings.backend is not None:
            from .compile import compiled

            program = compiled(program, self.name, self.settings.backend)
        record.first, record.shape = None, shape
        record.program = program  # last, for other threads

    def _say_who_looks(self) -> None:
        """Warn of a mode of Python functions that a program would pass by; a record around this region is none."""
        modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        if any(isinstance(mode, Recorder) for mode in modes):
            return
        strange = [type(mode) for mode in modes if not type(mode).__module__.startswith("vescale_dtensor")]
        if strange:
            name = f"{strange[-1].__module__}.{strange[-1].__qualname__}"
            self._say(f"it is called under the torch-function mode {name}, which must see every function")
        elif foreign_global_hook():
            self._say("there is a hook on all modules, which a program would not call")

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
                why = record.reason or f"recorded {int(record.first is not None)} of 2 times"
                parts.append(f"{title}: dynamic: {why}")
        return "\n\n".join(parts) or f"# {self.name}: not called yet"

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        roots = [copy.deepcopy(m, memo) for m in self._held._roots]
        function = self.function
        owner = getattr(function, "__self__", None)
        if owner is not None:
            function = getattr(type(owner), function.__name__).__get__(copy.deepcopy(owner, memo))
        return Region(function, roots, self.name, self._limit, self.settings)

    def __reduce__(self) -> Any:
        raise DTensorError(f"{self.name} is static, and its programs cannot be pickled; save its state_dict() instead.")


def _same_arguments(key: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> bool:
    """Whether the containers among the arguments hold after a call what they held before."""
    if not any(isinstance(value, list | tuple | dict) for value in (*args, *kwargs.values())):
        return True  # tensors may be written to, which a program repeats
    tensors: list[Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():
        try:
            same_kinds = arguments_key(args, kwargs, tensors) == key
        except NoKey:
            return False
    return same_kinds and [*map(id, tensors)] == [*map(id, inputs)]


def _run(record: _Record, given: list[Tensor]) -> Any:
    """Run a program; with dispatch off."""
    program, shape = record.program, record.shape
    assert program is not None
    assert shape is not None
    if not program.switches:
        made = program.run(*given)
    else:
        before = torch.is_grad_enabled()
        try:
            made = program.run(*given)
        finally:
            torch._C._set_grad_enabled(before)
    return shape.filled(
        [t if spec is None else _labelled(t, spec) for t, spec in zip(made, program.specs, strict=True)]
    )


def _onlookers() -> list[Any]:
    """Return the modes that see functions where all of them only look on, as that of `explain`; else nothing."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return modes if all(hasattr(mode, "program_runs") for mode in modes) else []


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
