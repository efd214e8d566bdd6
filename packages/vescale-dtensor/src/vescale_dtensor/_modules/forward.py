"""Hooks that move the inputs and outputs of modules to the placements of a plan.

A DTensor is redistributed, a plain tensor is taken as the same on every rank and then distributed; both
keep their gradients. None stays None. While a parallelized module runs, plain tensors that its code
makes (positions, masks) may meet DTensors.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._comm.move import move
from .._dispatch import policy
from .._mesh import MeshInfo
from .._spec import Spec, replicated
from .._tap import unrecorded
from .._tensor import DTensor, make
from ..errors import PlanError
from ..placements import AxisTypes, to_axis_types
from .agreement import digest, disagreements
from .entrance import Entrance
from .plan import Axes, Path, Request, merged, nearest

_DTENSORS = {DTensor}
_MOST_SETTLED = 256
"""Layouts of arguments that are kept; with ever new shapes they must not become ever more."""

Moved = dict[tuple[int, AxisTypes], DTensor]
"""Tensors moved for one call, by the address of what they were and the types that they have now."""


class Converter:
    """Moves the tensors inside nested values to where the requests want them."""

    def __init__(self, mesh: MeshInfo, title: str, requests: Sequence[Request]) -> None:
        self.mesh, self.title, self.requests = mesh, title, list(requests)
        self._wanted: dict[Path, Axes | None] = {}
        self._types: dict[tuple[Spec, Axes], AxisTypes] = {}

    def wanted(self, path: Path) -> Axes | None:
        """Placements for the value at `path`; None if nothing is asked of it."""
        if path not in self._wanted:
            found = [r.axes for r in self.requests if r.path == path[: len(r.path)]]
            self._wanted[path] = merged(found, self.mesh) if found else None
        return self._wanted[path]

    def convert(self, value: Any, path: Path, moved_already: Moved | None = None) -> Any:
        """Return `value` with its tensors moved; the same object if nothing moved.

        What occurs in `moved_already`, perhaps as another argument, is moved once and stays one object.
        """
        if isinstance(value, Tensor):
            return self.tensor(value, path, moved_already)
        items = children(value)
        if not items:
            return value
        moved = {k: self.convert(v, (*path, k), moved_already) for k, v in items}
        changed = {k: moved[k] for k, v in items if moved[k] is not v}
        return rebuilt(value, changed) if changed else value

    def tensor(self, value: Tensor, path: Path, moved_already: Moved | None = None) -> Tensor:
        """Move one tensor."""
        axes = self.wanted(path)
        if axes is None:
            return value
        x = value if isinstance(value, DTensor) else make(value, replicated(self.mesh, value.shape))
        types = self._types.get((x._spec, axes))
        if types is None:
            types = self._types[x._spec, axes] = self._decide(x._spec, axes, path)
        if moved_already is None:
            return move(x, types)
        key = (id(value), types)
        found = moved_already.get(key)
        if found is None:
            found = moved_already[key] = move(x, types)
        return found

    def _decide(self, spec: Spec, axes: Axes, path: Path) -> AxisTypes:
        where = ".".join((self.title, *path))
        if spec.mesh is not self.mesh:
            raise PlanError(f"{where} is a DTensor on {spec.mesh!r}, but the module was parallelized for {self.mesh!r}")
        types = list(spec.types)
        if not spec.ndim and not any(r.path == path for r in self.requests):
            return tuple(types)  # a number among the tensors that a request for all of them is about
        for axis, placement in enumerate(axes):
            if placement is None:
                continue
            try:
                (types[axis],) = to_axis_types([placement], mesh_ndim=1, ndim=spec.ndim)
            except ValueError as error:
                key = next(
                    r.key
                    for r in reversed(self.requests)
                    if r.path == path[: len(r.path)] and r.axes[axis] is placement
                )
                raise PlanError(
                    f'plan["forward"][{key!r}] does not fit {where}, a tensor of shape {list(spec.shape)}: {error}'
                ) from None
        return tuple(types)


def children(value: Any) -> list[tuple[str, Any]]:
    """Named parts of a container: a tuple, list, mapping or dataclass; nothing for other values."""
    if isinstance(value, list | tuple):
        return [(str(i), v) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return []


def rebuilt(value: Any, changed: dict[str, Any]) -> Any:
    """A copy of a container with some parts replaced."""
    if isinstance(value, list | tuple):
        items = [changed.get(str(i), v) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        new = copy.copy(value)
        new[:] = items
        return new
    new = copy.copy(value)
    if isinstance(value, Mapping):
        for key in value:
            if str(key) in changed:
                new[key] = changed[str(key)]
        return new
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new


class InputHook:
    """Forward pre-hook that converts the arguments of one module."""

    def __init__(self, mesh: MeshInfo, name: str, module: nn.Module, requests: Sequence[Request]) -> None:
        self.parameters, open_ended = _parameters(module)
        self.converter = Converter(mesh, _title(name, "input"), [self._by_name(r, name, open_ended) for r in requests])
        self._settled: set[tuple[Spec, ...]] = set()
        """Layouts of DTensors, as the only arguments and by position, of which none has to move."""

    def _by_name(self, request: Request, name: str, open_ended: bool) -> Request:
        """Address arguments by parameter name; refuse names that `forward` does not have."""
        if not request.path:
            return request
        first = request.path[0]
        if first.isdigit() and int(first) < len(self.parameters):
            first = self.parameters[int(first)]
        elif not open_ended and first not in self.parameters:
            raise PlanError(
                f'plan["forward"][{request.key!r}] asks for argument {first!r} of {name or "the module"}'
                f"{nearest(first, self.parameters)}; its forward takes {self.parameters}"
            )
        return dataclasses.replace(request, path=(first, *request.path[1:]))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        ours = not kwargs and set(map(type, args)) == _DTENSORS
        specs = tuple([a._spec for a in args]) if ours else ()
        if specs and specs in self._settled:
            return None
        names, convert = self.parameters, self.converter.convert
        seen: Moved = {}
        new = tuple([convert(a, (names[i] if i < len(names) else str(i),), seen) for i, a in enumerate(args)])
        if specs and all(map(operator.is_, new, args)):
            if len(self._settled) >= _MOST_SETTLED:
                self._settled.clear()
            self._settled.add(specs)
        return new, {k: convert(v, (k,), seen) for k, v in kwargs.items()}


class OutputHook:
    """Forward hook that converts the result of one module."""

    def __init__(self, mesh: MeshInfo, name: str, requests: Sequence[Request]) -> None:
        self.converter = Converter(mesh, _title(name, "output"), requests)
        self.checked = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.checked:
            self._check(output)
        return self.converter.convert(output, ())

    def _check(self, output: Any) -> None:
        """Refuse requests for parts that the output does not have."""
        paths = {path[:n] for path in _paths(output, ()) for n in range(len(path) + 1)}
        for request in self.converter.requests:
            if request.path not in paths:
                known = sorted(".".join(p) for p in paths if p)
                raise PlanError(
                    f'plan["forward"][{request.key!r}]: {self.converter.title} has no part {".".join(request.path)!r}'
                    f"{nearest('.'.join(request.path), known)}; it has {known or 'one tensor'}"
                )
        self.checked = True


def _paths(value: Any, path: Path) -> list[Path]:
    items = children(value)
    return [p for k, v in items for p in _paths(v, (*path, k))] if items else [path]


def _parameters(module: nn.Module) -> tuple[list[str], bool]:
    """Names of what `forward` takes, and whether it takes more (``*args``, ``**kwargs``)."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return [], True
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named, len(named) < len(parameters)


def _title(name: str, side: str) -> str:
    return f"{name}.{side}" if name else side


class Root:
    """What brackets a call of a parallelized module: policy for plain tensors, and a check of its plain inputs."""

    def __init__(self, mesh: MeshInfo, module: nn.Module) -> None:
        self.mesh = mesh
        self.parameters = _parameters(module)[0]
        self.depth = 0
        self.calls = 0
        self.entrance = Entrance()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward of the module."""
        if not policy.state.inside_modules:
            self.calls += 1
            if not self.calls & (self.calls - 1):
                with unrecorded():
                    self._check_inputs(args, kwargs)
        policy.state.inside_modules += 1
        self.depth += 1
        self.entrance.enter(module)

    def leave(self) -> None:
        """After it, also when it raised."""
        if self.depth:  # else a hook of the user's raised before `enter`
            self.depth -= 1
            self.entrance.leave()
            policy.state.inside_modules -= 1

    def _check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At the calls 1, 2, 4, 8, ...: all ranks make them, whatever they were given, so nobody waits alone."""
        names = self.parameters
        given = {names[i] if i < len(names) else f"argument {i}": a for i, a in enumerate(args)} | kwargs
        mine = {".".join(path): text for name, value in given.items() for path, text in _digests(value, (name,))}
        for name, said in disagreements(self.mesh, mine).items():
            lines = "; ".join(f"rank at {c}: {text}" for c, text in said)
            raise ValueError(
                f"input {name!r} of the parallelized module differs between the ranks of "
                f"{self.mesh!r} ({lines}). A plain tensor is "
                "taken as the same whole on every rank. If each rank passed its own batch, wrap it in "
                "DTensor.from_local(x, mesh, [Shard(0), ...]) with Shard(0) on the data-parallel axis; "
                "if every rank shall use the same, load or seed it alike"
            )


def _digests(value: Any, path: Path) -> list[tuple[Path, str]]:
    if isinstance(value, DTensor):
        return [(path, f"a DTensor {value._spec!r}")]
    if isinstance(value, Tensor):
        return [(path, digest(value))]
    return [found for k, v in children(value) for found in _digests(v, (*path, k))]


class EnterHook:
    """Forward pre-hook of the root."""

    def __init__(self, root: Root) -> None:
        self.root = root

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.root.enter(module, args, kwargs)


class LeaveHook:
    """Forward hook of the root, called after an exception too."""

    def __init__(self, root: Root) -> None:
        self.root = root

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.root.leave()
