"""What a model consists of, seen in one call on the meta device: units, groups of parameters, stream tensors.

A *unit* is a module that is planned as one, such as an attention or an MLP: the largest whose children have no
more than one matrix each. A *group* is parameters that are cut alike: those of modules that read the same tensor. The
*stream* is what flows between units: the tensors with a gradient that units take and give. Units of one structure at
the same place of repeated layers are *alike*; they are planned together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._dispatch.call import function_name
from .._irregular import interleaved
from .._modules.forward import _parameters, children
from .._modules.plan import Path
from .known import Known
from .rehearse import Example, failure, loss_of
from .skeleton import Run, Skeleton, is_layer, structure
from .stage import on_stage

Option = tuple[tuple[str, int], ...]
"""Parameters by name, and the axis type of each that is cut; parameters that are not named stay whole."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a module takes or gives."""

    path: Path
    """Where it stands in the input or output."""
    identity: int
    """Tells tensors apart."""
    shape: tuple[int, ...]
    """Its global shape."""
    flows: bool
    """Whether it has a gradient and at least two dims: whether it belongs to the stream."""


@dataclass(slots=True)
class Site:
    """The first call of a module."""

    name: str
    """Name of the module."""
    inputs: list[Value] = field(default_factory=list)
    """Tensors among its arguments."""
    outputs: list[Value] = field(default_factory=list)
    """Tensors in its result."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are cut alike."""

    options: tuple[Option, ...]
    """Ways to cut them along one mesh axis; the first leaves them whole."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A tensor that a plan may move, beside those of the stream."""

    section: str
    """`input` or `output`."""
    name: str
    """Of the module."""
    value: Value
    """The tensor."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is planned as one."""

    name: str
    """Its name in the skeleton."""
    groups: tuple[Group, ...]
    """Its parameters of two or more dims, in the order in which they are used."""
    inputs: tuple[Value, ...]
    """Stream tensors that it takes."""
    outputs: tuple[Value, ...]
    """Stream tensors that it gives."""
    sole: bool
    """Whether the stream tensor is all that it takes."""
    spots: tuple[Spot, ...]
    """Tensors at the borders of modules inside, and those among its inputs that are not of the stream."""
    likeness: Hashable
    """Equal for units that are alike."""


class Trace:
    """One call of a skeleton without a mesh.

    Args:
        skeleton: the model.
        example: its arguments.
        data: whether values of the example are looked at where the model asks for them.

    Attributes:
        sites: the first call of every module, by name.
        answers: whether what the model asked of its data holds, in the order of its questions.
        guesses: how often the example inputs alone did not tell.

    Raises:
        PlanError: the model does not run on the meta device.
    """

    def __init__(self, skeleton: Skeleton, example: Example, *, data: bool = True) -> None:
        self.skeleton = skeleton
        self.sites: dict[str, Site] = {}
        self._alive: list[Any] = []
        self._splits = _Splits()
        module, handles = skeleton.module, []
        for name, owner in module.named_modules():
            handles.append(owner.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(owner.register_forward_hook(self._leaving(name)))
        ghosts = example.on_meta(None)
        try:
            known = Known((example.args, example.kwargs) if data else (), (ghosts.args, ghosts.kwargs) if data else ())
            with on_stage() as stage, self._splits, known:
                loss_of(module(*ghosts.args, **ghosts.kwargs))
            self.answers, self.guesses = known.answers, stage.guesses
        except Exception as error:
            raise failure(error) from error
        finally:
            for handle in handles:
                handle.remove()
            self._blocks = self._splits.within
            for site in self.sites.values():
                for v in site.outputs:
                    if v.identity in self._splits.blocks:
                        self._blocks.setdefault(site.name, {})[v.shape[-1]] = self._splits.blocks[v.identity]
            self._alive.clear()
            self._splits.alive.clear()
            self._bias_dims = _bias_dims(module)

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._splits.running.append(name)
            if name not in self.sites:
                site = self.sites[name] = Site(name)
                names = _parameters(module)[0]
                given = {names[i] if i < len(names) else str(i): a for i, a in enumerate(args)} | kwargs
                for key, value in given.items():
                    self._collect(value, (key,), site.inputs)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._splits.running.pop()
            if not self.sites[name].outputs:
                self._collect(output, (), self.sites[name].outputs)

        return hook

    def _collect(self, value: Any, path: Path, into: list[Value]) -> None:
        if isinstance(value, Tensor):
            self._alive.append(value)
            flows = value.is_floating_point() and value.requires_grad and value.ndim > 1
            into.append(Value(path, id(value), tuple(value.shape), flows))
            return
        for key, item in children(value):
            self._collect(item, (*path, key), into)

    def apart(self, run: Run) -> list[str]:
        """Layers of a run that stand for themselves only, seen in a call in which two of them stand.

        All do where the second does not take what the first gives: what is done between them would not be counted.
        The first does where what flows has no gradient before it.
        """
        first, second = (self.sites.get(n) for n in run.names[:2])
        if not first or not second:
            return run.names
        given = {v.identity: v.shape for v in first.outputs if v.flows}
        if not any(v.identity in given for v in second.inputs):
            return run.names
        return run.names[:1] if any(v.shape in given.values() and not v.flows for v in first.inputs) else []

    # ---------------------------------------------------------------- units

    def units(self) -> list[Unit]:
        """The units in the order of their calls."""
        return [self._unit(name) for name in self._divide("")]

    def _divide(self, name: str) -> list[str]:
        """Names of the units that the module consists of."""
        parts, get = self._parts(name), self.skeleton.module.get_submodule
        runs = any(r.kept.startswith(name + "." if name else "") and r.kept != name for r in self.skeleton.runs)
        if parts and (runs or any(self._parts(p) or is_layer(get(p)) for p in parts)):
            return [unit for part in parts for unit in self._divide(part)]
        return [name]

    def _parts(self, name: str) -> list[str]:
        """The called modules with parameters that stand directly below `name`."""
        prefix = name + "." if name else ""
        get = self.skeleton.module.get_submodule
        below = [n for n in self.sites if n.startswith(prefix) and n != name and _any_parameter(get(n))]
        return [n for n in below if not any(o != n and n.startswith(o + ".") for o in below)]

    def _unit(self, name: str) -> Unit:
        site, groups = self.sites[name], tuple(self._groups(name))
        flowing = tuple(v for v in site.inputs if v.flows and name)  # those of the model itself are its batch
        given = tuple(v for v in site.outputs if v.flows)
        spots = tuple(self._spots(name))
        likeness = self._likeness(name, groups, spots, flowing, given)
        return Unit(name, groups, flowing, given, len(site.inputs) == len(flowing) == 1, spots, likeness)

    def _spots(self, name: str) -> Iterator[Spot]:
        site, prefix = self.sites[name], name + "." if name else ""
        if name:
            yield from (Spot("input", name, v) for v in site.inputs if v.shape and not v.flows)
        known = {v.identity for v in (*site.inputs, *site.outputs)}
        for inner in self.sites.values():
            if inner.name.startswith(prefix) and inner.name != name:
                for section, values in (("input", inner.inputs), ("output", inner.outputs)):
                    yield from (Spot(section, inner.name, v) for v in values if v.flows and v.identity not in known)

    def _likeness(
        self, name: str, groups: tuple[Group, ...], spots: tuple[Spot, ...], *values: tuple[Value, ...]
    ) -> Hashable:
        """The place of a unit, with a star for the position of layers in a row, and what it consists of."""
        get, path = self.skeleton.module.get_submodule, name.split(".")
        layers = [p.isdigit() and is_layer(get(".".join(path[: i + 1]))) for i, p in enumerate(path)]
        place = ".".join("*" if layer else p for layer, p in zip(layers, path, strict=True))
        ways = tuple(tuple(tuple(t for _, t in option) for option in g.options) for g in groups)
        flows = tuple(tuple((v.path, v.shape) for v in side) for side in values)
        places = tuple((s.section, s.name[len(name) :], s.value.path) for s in spots)
        return place, structure(get(name), {}), ways, places, flows

    def _groups(self, name: str) -> list[Group]:
        """Groups of a unit: modules that read one tensor share one, and so do modules that are not called."""
        readers: dict[Any, list[tuple[str, nn.Module]]] = {}
        unit = self.skeleton.module.get_submodule(name)
        modules = [(f"{name}.{n}" if name and n else name or n, m) for n, m in unit.named_modules()]
        order = {n: i for i, n in enumerate(self.sites)}
        for full, module in sorted(modules, key=lambda nm: order.get(nm[0], len(order))):
            if any(p.ndim > 1 for p in module._parameters.values() if p is not None):
                site = self.sites.get(full)
                key = (type(module), site.inputs[0].identity) if site and site.inputs and full != name else full
                readers.setdefault(key, []).append((full, module))
        return [g for same in readers.values() for g in _groups_of(same, self._blocks, self._bias_dims)]


def _any_parameter(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _Splits(TorchFunctionMode):
    """Notes which tensors are split into equal blocks along the last dim.

    Attributes:
        blocks: number of blocks by identity of the tensor.
        within: number of blocks by size of the dim, by name of the module in which it was split.
        running: names of the modules that are running, the innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, int] = {}
        self.within: dict[str, dict[int, int]] = {}
        self.running: list[str] = [""]
        self.alive: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), function_name(func)
        if name == _PACKED[0] and len(args) > _PACKED[1] and args[_PACKED[1]] is not None:
            self._note(args[_PACKED[1]].shape[0], 3)
        elif args and isinstance(args[0], Tensor) and args[0].ndim:
            blocks = _blocks_of(name, args[0], out)
            if blocks > 1:
                self.blocks[id(args[0])] = blocks
                self.alive.append(args[0])
                self._note(args[0].shape[-1], blocks)
        return out

    def _note(self, size: int, blocks: int) -> None:
        self.within.setdefault(self.running[-1], {})[size] = blocks


_PACKED = ("multi_head_attention_forward", 5)
"""A function and the position of its weight for queries, keys and values, which torch's own text splits unseen."""


def _blocks_of(name: str, x: Tensor, out: Any) -> int:
    """Into how many blocks a call cuts the last dim of its argument; up to three where it changes the shape."""
    if name in ("split", "chunk", "tensor_split") and isinstance(out, tuple | list):
        alike = len({t.shape for t in out}) == 1 and out[0].shape[-1] * len(out) == x.shape[-1]
        return len(out) if alike else 1
    if name in ("view", "reshape", "unflatten") and isinstance(out, Tensor) and out.ndim > x.ndim:
        last = x.ndim - 1
        if out.shape[:last] == x.shape[:last] and out.shape[last] <= 3:
            return out.shape[last]
    return 1


def _bias_dims(root: nn.Module) -> dict[type, int]:
    """By class, the dim of the matrix whose cut a bias shares, where the shapes of some module of the class tell it."""
    found: dict[type, int] = {}
    for module in root.modules():
        held = [p for p in module._parameters.values() if p is not None]
        matrices, vectors = [p for p in held if p.ndim > 1], [p for p in held if p.ndim == 1]
        if len(matrices) == len(vectors) == 1:
            dims = [d for d, size in enumerate(matrices[0].shape) if size == vectors[0].shape[0]]
            if len(dims) == 1:
                found[type(module)] = dims[0]
    return found


def _groups_of(
    modules: list[tuple[str, nn.Module]], blocks: dict[str, dict[int, int]], bias_dims: dict[type, int]
) -> list[Group]:
    """One group for modules with one matrix each that can be cut alike, else one group per matrix."""
    ways = [_ways(name, module, blocks.get(name, {}), bias_dims.get(type(module))) for name, module in modules]
    if len(ways) > 1 and all(len(w) == 1 for w in ways):
        common = [k for k in ways[0][0] if all(k in w[0] for w in ways)]
        if len(common) > 1:
            return [Group(tuple(sum((w[0][k] for w in ways), ()) for k in common))]
    return [Group(tuple(matrix.values())) for w in ways for matrix in w]


def _ways(
    name: str, module: nn.Module, blocks: dict[int, int], bias_dim: int | None
) -> list[dict[tuple[int, bool], Option]]:
    """Ways to cut the parameters of one module, for each of its matrices, by axis type and whether a bias goes along.

    A bias of as many elements as a dim of the matrix goes with the cut of that dim. Where several dims fit and nothing
    tells which it is, both are ways. A dim that is split into equal blocks may be cut within each of them.
    """
    prefix = name + "." if name else ""
    held = [(prefix + n, p) for n, p in module._parameters.items() if p is not None]
    matrices = [(n, p) for n, p in held if p.ndim > 1]
    vectors = [(n, p) for n, p in held if p.ndim == 1] if len(matrices) == 1 else []
    found = []
    for matrix, p in matrices:
        options: dict[tuple[int, bool], Option] = {(-1, False): ()}
        for dim, size in enumerate(p.shape):
            if size == 1:
                continue
            fitting = [n for n, v in vectors if v.shape[0] == size and bias_dim in (dim, None)]
            if fitting:
                options[dim, True] = ((matrix, dim), *((n, 0) for n in fitting))
            if not fitting or (bias_dim is None and sum(s == size for s in p.shape) > 1):
                options[dim, False] = ((matrix, dim),)
            count = blocks.get(size, 1)
            if count > 1 and (fitting or not vectors):
                each = interleaved(dim, count)
                options[each, bool(fitting)] = ((matrix, each), *((n, interleaved(0, count)) for n in fitting))
        found.append(options)
    return found


__all__ = ["Group", "Option", "Site", "Spot", "Trace", "Unit", "Value"]
