"""The code of one stage: Python text made from recorded calls, and the module that runs it."""

from __future__ import annotations

import itertools
import linecache
import math
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .record import Training
from .tree import Path, Slot, fill, leaves, mapped, pick
from .values import Context, Node, Value, call_name

__all__ = ["Program", "StageModule", "compile_program", "write"]

_counter = itertools.count()


class Program:
    """Text of a function and the constants it uses."""

    def __init__(self, text: str, constants: dict[str, Any], uses_mode: bool) -> None:
        self.text = text
        self.constants = constants
        self.uses_mode = uses_mode

    def __reduce__(self) -> Any:
        return Program, (self.text, self.constants, self.uses_mode)


def compile_program(program: Program) -> Callable[..., Any]:
    """Return the function of a program; its lines show in tracebacks."""
    file = f"<vescale_pipe stage {next(_counter)}>"
    linecache.cache[file] = (len(program.text), None, program.text.splitlines(keepends=True), file)
    scope = dict(program.constants, _fill=fill, _pick=pick, _checkpoint=checkpoint, _torch=torch)
    exec(compile(program.text, file, "exec"), scope)
    made: Callable[..., Any] = scope["stage"]
    return made


class StageModule(nn.Module):
    """A stage of a model: the model's own modules under their own names, and the calls between them.

    Call it with one value per input of the stage; it returns a tuple of one value per output.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._run = compile_program(program)
        self._witness: tuple[str, ...] = ()
        self._model: weakref.ref[nn.Module] | None = None
        self._model_trained = True

    def follow(self, model: nn.Module, witness: tuple[str, ...]) -> None:
        """Take the mode of a model from now on.

        Args:
            model: the whole one.
            witness: path of a module of this stage that is in the same mode as the model; empty if there is none.
        """
        self._witness = witness
        self._model = weakref.ref(model)
        self._model_trained = self.training = model.training

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Run the stage."""
        result: tuple[Any, ...] = self._run(self, *values)
        return result

    def _mode(self) -> bool:
        """Return whether this stage trains: as was said last, by `train` of the stage or of the model."""
        if self._witness:  # one of the model's own modules, which both set
            module: Any = self
            for name in self._witness:
                module = module._modules[name]
            return bool(module.training)
        model = self._model() if self._model is not None else None
        if model is not None and model.training != self._model_trained:
            self._model_trained = self.training = model.training
        return self.training

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_run"}
        return {**state, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._run = compile_program(self._program)


class _Writer:
    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self._by_id: dict[int, str] = {}
        self.names: dict[int, str] = {}  # variable of each value by number
        self.uses_mode = False

    def constant(self, value: Any) -> str:
        name = self._by_id.get(id(value))
        if name is None:
            called = call_name(value) if callable(value) else ""
            name = self._by_id[id(value)] = f"_{called if called.isidentifier() else 'c'}_{len(self.constants)}"
            self.constants[name] = value
        return name

    def variable(self, value: Value) -> str:
        """Return the expression that gives a value."""
        if value.source == "constant":
            return self.constant(value.key)
        if value.source in ("parameter", "buffer"):
            owner, _, name = value.key.rpartition(".")
            return f"{_module(owner)}._{value.source}s[{name!r}]"
        return self.names[value.number]

    def expression(self, value: Any) -> str:
        """Return Python text for an argument."""
        kind = type(value)
        if kind is Value:
            return self.variable(value)
        if kind is Training:
            self.uses_mode = True
            return "mode"
        if value is None or kind in (bool, int, str, bytes) or (kind is float and math.isfinite(value)):
            return repr(value)
        if not any(isinstance(leaf, (Value, Training)) for leaf in leaves(value)):
            return self.constant(value)
        if kind is tuple:
            return "(" + "".join(f"{self.expression(item)}, " for item in value) + ")"
        if kind is list:
            return "[" + ", ".join(map(self.expression, value)) + "]"
        if kind is dict:
            return "{" + ", ".join(f"{self.expression(k)}: {self.expression(v)}" for k, v in value.items()) + "}"
        if kind is slice:
            return (
                f"slice({self.expression(value.start)}, {self.expression(value.stop)}, {self.expression(value.step)})"
            )
        found: list[Any] = []

        def leaf(item: Any, path: Path) -> Any:
            if not isinstance(item, (Value, Training)):
                return item
            found.append(item)
            return Slot(len(found) - 1)

        template = self.constant(mapped(leaf, value))
        return f"_fill({template}, ({''.join(f'{self.expression(item)}, ' for item in found)}))"

    def result(self, path: Path) -> str:
        """Return how a leaf is picked from the variable `r`."""
        if any(step.kind == "leaf" or not isinstance(step.key, (int, str)) for step in path):
            return f"_pick(r, {self.constant(path)})"
        return "r" + "".join(f"[{step.key!r}]" if step.kind == "item" else f".{step.key}" for step in path)

    def call(self, node: Node) -> str:
        parts = [self.expression(item) for item in node.args]
        if all(name.isidentifier() for name in node.kwargs):
            parts += [f"{name}={self.expression(item)}" for name, item in node.kwargs.items()]
        else:
            parts.append(f"**{self.expression(dict(node.kwargs))}")
        target = self.constant(_picklable(node.function)) if node.module is None else _module(node.module)
        if node.recompute:
            return f"_checkpoint({', '.join([target, *parts])}, use_reentrant=False)"
        return f"{target}({', '.join(parts)})"

    def context(self, context: Context) -> str | None:
        managers = ["_torch.no_grad()"] if context.no_grad else []
        if context.autocast is not None:
            kind, enabled, dtype = context.autocast
            managers.append(f"_torch.autocast({kind!r}, enabled={enabled}, dtype={self.constant(dtype)})")
        return f"with {', '.join(managers)}:" if managers else None


class _Getter:
    """Gets a property of a tensor; unlike the property's own function it can be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.__name__ = name

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return getattr(tensor, self.name)


def _picklable(function: Any) -> Any:
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and owner is not None:
        return _Getter(owner.__name__)
    return function


def _module(name: str) -> str:
    return "self" + "".join(f"._modules[{part!r}]" for part in name.split(".") if part)


def write(nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Any], *, sent: bool = False) -> Program:
    """Write the function of a stage.

    Args:
        nodes: calls, in order.
        inputs: values it is given.
        outputs: what it returns: values, or constants where the model returns such.
        sent: whether the outputs go to other stages.

    Returns:
        the program; its function is called `stage`.
    """
    writer = _Writer()
    lines: list[str] = []
    for index, value in enumerate(inputs):
        writer.names[value.number] = f"a{index}"
        if value.copied:
            lines.append(f"    a{index} = a{index}.clone()")
    block: str | None = None
    for node in nodes:
        heading = writer.context(node.context)
        if heading != block:
            block = heading
            if heading is not None:
                lines.append(f"    {heading}")
        indent = "        " if heading is not None else "    "
        call = writer.call(node)
        for old, new in node.touched:
            # The same object in memory; an attribute of a module stays one.
            writer.names[new.number] = writer.variable(old) if _available(old, writer) else ""
        if len(node.outputs) == 1 and not node.outputs[0].key:
            writer.names[node.outputs[0].number] = name = f"v{node.outputs[0].number}"
            lines.append(f"{indent}{name} = {call}")
            continue
        lines.append(f"{indent}r = {call}" if node.outputs else f"{indent}{call}")
        for value in node.outputs:
            writer.names[value.number] = name = f"v{value.number}"
            lines.append(f"{indent}{name} = {writer.result(value.key)}")
    # What is sent must not change when the next micro-batch changes a buffer.
    copies = [sent and isinstance(item, Value) and _in_buffer(item) for item in outputs]
    texts = [writer.expression(item) + (".clone()" if copy else "") for item, copy in zip(outputs, copies, strict=True)]
    result = "".join(f"{text}, " for text in texts)
    # Lines, and then what is returned, so that nothing of that is dropped.
    lines = _freed([*lines, f"    return ({result})"])
    lines = lines[: next(index for index, line in enumerate(lines) if line.startswith("    return (")) + 1]
    if writer.uses_mode:
        lines.insert(0, "    mode = self._mode()")
    names = ", ".join(["self", *(f"a{index}" for index in range(len(inputs)))])
    text = "\n".join([f"def stage({names}):", *lines, ""])
    return Program(text, writer.constants, writer.uses_mode)


def _in_buffer(value: Value) -> bool:
    while value.alias is not None:
        value = value.alias
    return value.source in ("buffer", "constant")


def _available(value: Value, writer: _Writer) -> bool:
    return (value.source != "node" and value.source != "batch") or value.number in writer.names


def _freed(lines: Sequence[str]) -> list[str]:
    """Drop each variable after the last line that names it."""
    assigned = {found[1] for line in lines if (found := re.match(r" +(v\d+|r) = ", line))}
    out: list[str] = []
    last: set[str] = set()
    for line in reversed(lines):
        dead = sorted((set(re.findall(r"\b(?:v\d+|r)\b", line)) & assigned) - last)
        last |= set(dead)
        if dead and not line.endswith(":"):
            indent = line[: len(line) - len(line.lstrip())]
            out.append(f"{indent}del {', '.join(dead)}")
        out.append(line)
    return out[::-1]
