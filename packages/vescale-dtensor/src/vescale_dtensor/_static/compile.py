"""A recorded program, handed to `torch.compile` as one graph.

The casts of parameters stay outside, for other programs and the dynamic path share them. What is compiled is a
function of plain local tensors. It is one call to Dynamo, which has nothing to decide here; AOTAutograd looks into it,
with communications and draws as opaque steps (see `ops`), and traces its backward too.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._comm.gradients import Bucket, Door
from .._dispatch.call import function_name
from ..errors import DTensorError
from .moves import cast
from .ops import Steps
from .program import Program
from .substitutes import NoDraws, substitute, tracing

__all__ = ["backend_of", "compiled", "possible"]

_NO_COMPILER = frozenset(["InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton"])
"""Errors of torch where there is no compiler for the code that it generates."""


def backend_of(compile: bool | str) -> str:
    """Return the name of the backend that a user asks for.

    Raises:
        ValueError: there is none of that name.
    """
    if not isinstance(compile, str):
        return "inductor"
    from torch._dynamo import list_backends

    if compile not in (known := list_backends(exclude_tags=())):
        raise ValueError(f"compile: expected True or one of {sorted(known)}, got {compile!r}")
    return compile


def possible(passes: Sequence[str]) -> tuple[str, ...]:
    """Leave out passes that the steps of a graph, which are made one after the other, have no use for."""
    return tuple(name for name in passes if name not in ("overlap", "buffers"))


def compiled(program: Program, name: str, backend: str) -> Program:
    """Return a program that compiles itself in its first call.

    Args:
        program: what to compile.
        name: of what was recorded, for messages.
        backend: of `torch.compile`.
    """
    parts = _Parts(program)
    return program if not parts.made else dataclasses.replace(program, run=_Run(parts, name, backend))


class _Parts:
    """A program in two: what stays outside, and what is compiled."""

    def __init__(self, program: Program) -> None:
        self.globals = program.run.__globals__
        (function,) = ast.parse(program.source).body
        assert isinstance(function, ast.FunctionDef)
        self.given = [argument.arg for argument in function.args.args]
        self.outside = set(self.given)
        self.written: set[str] = set()
        before: list[ast.stmt] = []
        inside: list[ast.stmt] = []
        *body, returned = function.body
        for statement in body:
            if self._stays(statement):
                before.append(statement)
            else:
                inside.append(statement)
                if self._writes(statement):
                    self.written.update(_names(statement))
        assert isinstance(returned, ast.Return)
        assert isinstance(returned.value, ast.Tuple)
        self.returned = [_name(item) for item in returned.value.elts]
        self.made = list(dict.fromkeys(n for n in self.returned if n not in self.outside))
        inside = [kept for statement in inside if (kept := self._without_deletes(statement)) is not None]
        used = list(dict.fromkeys(n for statement in inside for n in _names(statement)))
        self.needed = [n for n in used if n in self.outside]
        self.constants = [n for n in used if isinstance(self.globals.get(n), Tensor)]
        self.before, self.inside = before, inside

    def _stays(self, statement: ast.stmt) -> bool:
        """Whether a statement casts parameters; takes note of what it makes."""
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return False
        call = statement.value
        function = self.globals.get(_name(call.func))
        if function is not cast and not isinstance(function, Bucket | Door):
            return False
        names = {n for argument in call.args for n in _names(argument)} - self.globals.keys()
        if names - self.outside or names & self.written:
            return False
        self.outside.update(n for target in statement.targets for n in _names(target))
        return True

    def _writes(self, statement: ast.stmt) -> bool:
        """Whether a statement may write to what it is given."""
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return True
        call = statement.value
        name = function_name(self.globals.get(_name(call.func)))
        return name.endswith("_") or any(keyword.arg == "out" for keyword in call.keywords)

    def _without_deletes(self, statement: ast.stmt) -> ast.stmt | None:
        """Leave out that names from outside are deleted: they may not be there."""
        if not isinstance(statement, ast.Delete):
            return statement
        targets = [t for t in statement.targets if _name(t) not in self.outside]
        return ast.Delete(targets) if targets else None

    def enter(self) -> Callable[..., tuple[list[Tensor], tuple[Tensor, ...]]]:
        """Return the function of what is given to what the compiled part needs, and what is returned as it is."""
        kept = [n for n in self.returned if n in self.outside]
        lines = [ast.unparse(s) for s in self.before]
        lines.append(f"return [{', '.join(f'plain({n})' for n in self.needed)}], ({''.join(f'{n}, ' for n in kept)})")
        enter: Callable[..., tuple[list[Tensor], tuple[Tensor, ...]]]
        enter = _defined("enter", self.given, lines, {**self.globals, "plain": _plain})
        return enter

    def main(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function that is traced."""
        lines = [*map(ast.unparse, self.inside), f"return ({''.join(f'{n}, ' for n in self.made)})"]
        namespace = {n: substitute(v) if callable(v) else v for n, v in self.globals.items()}
        main: Callable[..., tuple[Tensor, ...]]
        main = _defined("program", [*self.needed, *self.constants], lines, namespace)
        return main


class _Run:
    """A program of which a part is compiled.

    Args:
        parts: of the program.
        name: for messages.
        backend: of `torch.compile`.
    """

    def __init__(self, parts: _Parts, name: str, backend: str) -> None:
        self.name, self.backend = name, backend
        self.steps = Steps()
        self._enter = parts.enter()
        self._constants = [parts.globals[n] for n in parts.constants]
        outside = iter(range(len(parts.returned)))
        self._order = [
            (n in parts.outside, parts.made.index(n) if n in parts.made else next(outside)) for n in parts.returned
        ]
        main, steps = parts.main(), self.steps

        def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
            steps.restart()
            with tracing(steps), NoDraws():  # type: ignore[no-untyped-call]
                return main(*tensors)

        self._traced = torch.compiler.allow_in_graph(traced)  # type: ignore[no-untyped-call]
        arguments = [*parts.needed, *parts.constants]
        # Code of its own, for Dynamo counts how often one code object is compiled.
        call = _defined("compiled", arguments, [f"return traced({', '.join(arguments)})"], {"traced": self._traced})
        self._call: Callable[..., Any] = torch.compile(call, backend=self._compile, fullgraph=True, dynamic=False)
        self._ready = False

    def _compile(self, graph: Any, inputs: list[Tensor]) -> Any:
        from torch._dynamo import lookup_backend
        from torch._functorch import config

        with tracing(self.steps), config.patch(enable_autograd_cache=False):
            return lookup_backend(self.backend)(graph, inputs)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        needed, outside = self._enter(*tensors)
        made = self._call(*needed, *self._constants) if self._ready else self._first(needed)
        return tuple([outside[i] if is_outside else made[i] for is_outside, i in self._order])

    def _first(self, needed: list[Tensor]) -> tuple[Tensor, ...]:
        try:
            with warnings.catch_warnings():  # Dynamo looks at `.grad` of parameters' local parts, which are no leaves
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                made: tuple[Tensor, ...] = self._call(*needed, *self._constants)
        except Exception as error:
            explained = _explained(error, self.name, self.backend)
            if explained is None:
                raise
            raise explained from error
        self._ready = True
        return made


def _explained(error: BaseException, name: str, backend: str) -> DTensorError | None:
    """Return what a user can do about an error of the compiler; None for an error of the program itself."""
    from torch._dynamo.exc import TorchDynamoException

    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if isinstance(one, DTensorError):
            return type(one)(f"{name} cannot be compiled: {one}")
        if type(one).__name__ in _NO_COMPILER:
            return DTensorError(
                f"{name} cannot be compiled: compile = {backend!r} needs a compiler that this machine lacks "
                f"({one}). Install one, such as g++, or name it in the environment variable CXX; or leave out compile"
            )
    if any(isinstance(one, TorchDynamoException) or "inductor" in type(one).__module__ for one in chain):
        said = str(chain[-1]).strip().partition("\n")[0]
        return DTensorError(f"{name} cannot be compiled: {type(chain[-1]).__name__}: {said}. Leave out compile")
    return None


def _plain(x: Tensor) -> Tensor:
    """Return a second, plain object for the local part of a tensor, connected to its graph; with dispatch off."""
    return x if x.__class__ in (Tensor, nn.Parameter) else x.as_subclass(Tensor)


def _defined(name: str, arguments: Sequence[str], lines: Sequence[str], namespace: dict[str, Any]) -> Any:
    source = "\n    ".join([f"def {name}({', '.join(arguments)}):", *lines])
    filename = f"<static {name} {id(namespace):#x}>"
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename  # for tracebacks
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""
