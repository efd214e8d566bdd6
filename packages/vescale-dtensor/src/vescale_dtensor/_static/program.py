"""From a record to Python: a straight line of calls on local tensors, readable and compiled.

Names: `p0` parameters, buffers and attributes, `x0` inputs, `t0` results, `c0` constants, `k0` tensors that follow from
constants alone (positions, masks), which are made once. Results that nobody uses are
left out where their function does nothing else, and every name is deleted after its last use, so that memory is free
as early as in a program written by hand.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._comm.plan import Plan
from .._dispatch.call import function_name
from .._spec import Spec
from .._tensor import DTensor
from .aliases import settle_aliases
from .fold import constants
from .moves import cast, shift
from .passes import Settings, improve
from .recorder import Op, Recorder, tensors_of
from .values import Value, values_of

__all__ = ["Program", "Unwritable", "write"]

RESERVED = ("slice", "program", "switch_gradients", "True", "False", "None")
"""Names that stand for something else in a program."""


_numbers = itertools.count()


class Unwritable(Exception):
    """A record that has no program."""


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded call as a function of local tensors."""

    run: Callable[..., Any]
    """Takes parameters, then inputs; returns a tuple of tensors."""
    source: str
    """Its Python."""
    specs: list[Spec | None]
    """Of the tensors of the result; None for a plain one."""
    switches: bool
    """Whether it switches gradients on or off."""
    notes: list[str]
    """What passes did."""


@dataclass(slots=True)
class _Writer:
    names: dict[Value, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    functions: dict[Any, str] = field(default_factory=dict)
    lines: list[tuple[str, list[str], list[str]]] = field(default_factory=list)
    """Text, names that it makes, names that it uses."""
    used: list[str] = field(default_factory=list)
    made: dict[Value, Tensor] = field(default_factory=dict)
    """Results that are the same in every call, by the value of their first object."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Those of them that a step uses."""
    count: int = 0

    def tensor(self, value: Value) -> str:
        first = value.first
        name = self.names.get(first)
        if name is None and first in self.made:
            name = self.names[first] = f"k{len(self.kept)}"
            self.kept[name] = self.made[first]
        if name is None:
            raise Unwritable("a tensor that no step of the record made")
        self.used.append(name)
        return name

    def value(self, value: Any) -> str:
        if isinstance(value, Value):
            return self.tensor(value)
        if type(value) in (list, tuple, torch.Size):
            items = ", ".join(map(self.value, value))
            if isinstance(value, list):
                return f"[{items}]"
            return f"({items}{',' if len(value) == 1 else ''})"
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        if type(value) is slice:
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if value is Ellipsis:
            return "..."
        if type(value) is Plan:
            return self.plan(value)
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return self.constant(value, str(value).replace("torch.", ""))
        if tensors_of([value, getattr(value, "__dict__", {})]):
            raise Unwritable(f"an argument of type {type(value).__name__} that holds tensors")
        return self.constant(value, type(value).__name__)

    def plan(self, steps: Plan) -> str:
        return self.constant(steps, f"{steps.source}_to_{steps.target.types}")

    def constant(self, value: Any, hint: str) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        word = "".join(c if c.isalnum() else "_" for c in hint).strip("_")
        name = f"c{len(self.constants)}_{word}"
        self.constants[name] = value
        return name

    def function(self, function: Callable[..., Any]) -> str:
        name = self.functions.get(function)
        if name is None:
            hint = function_name(function)
            if hint == "apply":  # of an autograd function
                hint = getattr(getattr(function, "__self__", None), "__name__", hint)
            word = "".join(c if c.isalnum() or c == "_" else "_" for c in hint) or "function"
            word = f"{word}_function" if keyword.iskeyword(word) or word in RESERVED else word
            taken = set(self.functions.values())
            number, name = 1, word
            while name in taken:
                number, name = number + 1, f"{word}_{number + 1}"
            self.functions[function] = name
        return name

    def fresh(self, value: Value) -> str:
        name = f"t{self.count}"
        self.count += 1
        self.names[value.first] = name
        return name

    def add(self, text: str, makes: Sequence[str] = ()) -> None:
        self.lines.append((text, list(makes), self.used))
        self.used = []


def write(
    recorder: Recorder,
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    results: Sequence[Tensor],
    settings: Settings,
) -> Program:
    """Write a record down.

    Args:
        recorder: with the record.
        inputs: tensors among the arguments of the call.
        held: parameters, buffers and attributes of modules.
        results: tensors among what the call returned.
        settings: passes over the record.

    Raises:
        Unwritable: something in it has no spelling.
    """
    look = recorder.values.look
    writer = _Writer()
    for letter, tensors in (("p", held), ("x", inputs)):
        for number, tensor in enumerate(tensors):
            writer.names.setdefault(look(tensor), f"{letter}{number}")
    given, out = [look(t) for t in (*held, *inputs)], [look(t) for t in results]
    gradients = first = torch.is_grad_enabled()
    needed = _needed(settle_aliases(recorder.ops, given, out), out)
    same_always = constants(needed, [*given, *out])
    for op in needed:
        if id(op) in same_always:
            writer.made[op.result.first] = op.result.constant
    ops = [op for op in needed if id(op) not in same_always]
    ops, notes = improve(ops, given, out, writer.made, settings)
    for op in ops:
        if op.gradients != gradients:
            gradients = op.gradients
            writer.add(f"switch_gradients({gradients})")
        _write_op(writer, op)
    if gradients != first:
        writer.add(f"switch_gradients({first})")
    switches = any(text.startswith("switch") for text, _, _ in writer.lines)
    returned = [writer.tensor(value) for value in out]
    specs = [tensor._spec if isinstance(tensor, DTensor) else None for tensor in results]
    signature = [f"p{n}" for n in range(len(held))] + [f"x{n}" for n in range(len(inputs))]
    body = _with_deletes(writer.lines, returned)
    told = [f"# {note}" for note in notes]
    source = "\n    ".join(
        [
            f"def program({', '.join(signature)}):",
            *told,
            *body,
            f"return ({''.join(f'{r}, ' for r in returned)})",
        ]
    )
    return Program(_compiled(source, writer), source, specs, switches, notes)


def _needed(ops: Sequence[Op], results: Sequence[Value]) -> list[Op]:
    """Leave out steps whose results nobody uses; those that autograd saw stay, as checkpoints count what they save."""
    live = {value.first for value in results}
    needed = []
    for op in reversed(ops):
        used = values_of((op.args, op.kwargs))
        fresh = [value for value in values_of(op.result) if value not in used]
        if op.keeps or any(value.first in live or value.has_graph for value in fresh):
            needed.append(op)
            live.update(value.first for value in used)
    return needed[::-1]


def _write_op(writer: _Writer, op: Op) -> None:
    if op.is_free:
        writer.names.setdefault(op.result.first, writer.tensor(op.args[0]))
        writer.used = []
        return
    call = _call(writer, op)
    result = op.result
    if isinstance(result, Value):
        if result.first in writer.names:
            if op.keeps:
                writer.add(call)
            else:
                writer.used = []  # it returned its argument
            return
        name = writer.fresh(result)
        writer.add(f"{name} = {call}", [name])
        return
    if isinstance(result, list) and values_of(result):
        names = []
        for item in result:
            if isinstance(item, Value):
                names.append("_" if item.first in writer.names else writer.fresh(item))
            elif values_of(item):
                raise Unwritable(f"{function_name(op.function)} returns tensors in containers of containers")
            else:
                names.append("_")
        writer.add(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}", [n for n in names if n != "_"])
        return
    writer.add(call)


def _call(writer: _Writer, op: Op) -> str:
    steps = op.plan
    if steps is not None:
        x = op.args[0]
        # The cast of a parameter is kept with it, for all who need one before gradients come.
        function = cast if x.given is not None and steps.kind == "cast" else shift
        return f"{writer.function(function)}({writer.tensor(x)}, {writer.plan(steps)})"
    parts = [writer.value(a) for a in op.args]
    parts += [f"{key}={writer.value(v)}" for key, v in op.kwargs.items()]
    return f"{writer.function(op.function)}({', '.join(parts)})"


def _with_deletes(lines: Sequence[tuple[str, list[str], list[str]]], returned: Sequence[str]) -> list[str]:
    last: dict[str, int] = {}
    for number, (_, makes, uses) in enumerate(lines):
        for name in (*makes, *uses):
            if name.startswith("t") and name not in returned:
                last[name] = number
    body = []
    for number, (text, _, _) in enumerate(lines):
        body.append(text)
        dead = [name for name, at in last.items() if at == number]
        if dead:
            body.append(f"del {', '.join(dead)}")
    return body


def _compiled(source: str, writer: _Writer) -> Callable[..., Any]:
    namespace: dict[str, Any] = {name: function for function, name in writer.functions.items()}
    namespace |= writer.constants
    namespace |= {name: tensor.detach() for name, tensor in writer.kept.items()}
    namespace["switch_gradients"] = torch._C._set_grad_enabled
    filename = f"<static program {next(_numbers)}>"
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename  # for tracebacks
    exec(compile(source, filename, "exec"), namespace)
    return namespace.pop("program")  # type: ignore[no-any-return]  # which has them, too: not in a circle
