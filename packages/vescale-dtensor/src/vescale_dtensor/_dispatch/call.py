"""What a sharding rule sees of a call, and what it answers.

A rule is a function `Call -> Rule | None`. It answers in terms of ONE mesh axis: which types of
the operands give which types of the results without communication. The engine chooses a strategy
for every axis, moves the operands, and runs the function on local parts. Only forward reasoning
is needed: a strategy over {S, R, P} that is right forward is right backward (see `placements`).

    def transpose_rule(call):
        dim0, dim1 = ...
        shape = swapped(call.specs[0].shape)
        return Rule([shape], [Strategy((d,), (swapped_dim(d),)) for d in range(ndim)] + [Strategy((P,), (P,))])

Always added by the engine: all operands I to all results I, and all R to all R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .._mesh import MeshInfo
from .._spec import Spec, replicated
from ..errors import MeshMismatchError

if TYPE_CHECKING:
    from .._tensor import DTensor

Shape = tuple[int, ...]
LocalFunction = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""`local(function, args, kwargs)`: runs with dispatch off, so the DTensors among the args are local parts."""


class Strategy(NamedTuple):
    """Types along one mesh axis under which the local function gives the local results."""

    ins: tuple[int, ...]
    """One axis type per tensor operand, in the order of `Call.operands`."""
    outs: tuple[int, ...]
    """One axis type per tensor result."""
    even: tuple[tuple[int, int], ...] = ()
    """(operand, dim) or (~result, dim) that all its shards must divide evenly."""
    exact: bool = False
    """Offered only where the operands have these types already (R may come from I): used to keep sums pending."""
    when: Callable[[int, list[Strategy]], bool] | None = None
    """Further condition, asked with the mesh axis and the strategies chosen for the axes before it."""
    block: bool = False
    """Holds for blocks of the dim only, though the rule is uniform: the place of the block matters."""


class Rewrite(NamedTuple):
    """Run `function(first argument, *tail)` on the local part instead: the cheapest way to localize."""

    function: Any
    tail: tuple[Any, ...]


Localized = LocalFunction | Rewrite | None


@dataclass(slots=True)
class Rule:
    """What a rule says of one call."""

    shapes: Sequence[Shape]
    """Global shapes of the tensor results, in order."""
    strategies: Sequence[Strategy]
    """Strategies besides all-I and all-R, cheapest to describe first; ties go to the earlier one."""
    localize: Callable[[list[Spec], list[Spec]], Localized] | None = None
    """Given the chosen operand and result specs of this rank: what to run instead of the function, None to keep it."""
    replicated_ok: bool = True
    """Whether all-I and all-R are valid (not for random operators)."""
    view: bool = False
    """Whether the result shares memory with the first operand; if that must move, writing to the result is refused."""
    uniform: bool = False
    """Whether every position of a sharded dim is treated alike and by itself, so that any set of positions may be a
    shard: then ragged and interleaved operands are computed on as they are."""


class Call:
    """One call of a function with at least one DTensor among its arguments."""

    __slots__ = ("args", "func", "kwargs", "mesh", "operands", "paths", "plain", "specs")

    operands: list[Tensor]
    """The tensor arguments, those inside lists and keywords included."""
    specs: list[Spec]
    """Their specs; a plain tensor has the spec of a replicated one."""
    plain: list[bool]
    """Which of them are plain."""
    paths: list[tuple[Any, ...]]
    """Where each stands: (position,), (keyword,), or (position, index...)."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from .._tensor import DTensor

        self.func, self.args, self.kwargs = func, args, kwargs
        self.operands, self.paths = [], []
        for i, value in enumerate(args):
            self._collect(value, (i,))
        for key, value in kwargs.items():
            self._collect(value, (key,))
        first = next(t for t in self.operands if isinstance(t, DTensor))
        self.mesh: MeshInfo = first._spec.mesh
        self.specs, self.plain = [], []
        for t in self.operands:
            self.specs.append(t._spec if isinstance(t, DTensor) else replicated(self.mesh, t.shape))
            self.plain.append(not isinstance(t, DTensor))
        if any(s.mesh is not self.mesh for s in self.specs):
            found = ", ".join(f"{s!r} on {s.mesh!r}" for s in self.specs)
            raise MeshMismatchError(
                f"{self.name} got DTensors of different meshes: {found}. One operation works on one mesh: "
                "take full_tensor() of one of them and distribute it on the other's mesh"
            )

    def _collect(self, value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, Tensor):
            self.operands.append(value)
            self.paths.append(path)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                self._collect(item, (*path, i))

    @property
    def name(self) -> str:
        """Name of the function for messages."""
        return function_name(self.func)

    @property
    def shape(self) -> torch.Size:
        """Global shape of the first operand."""
        return self.specs[0].shape

    @property
    def ndim(self) -> int:
        """Number of dims of the first operand."""
        return self.specs[0].ndim

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Argument by position, else by keyword, else `default`."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def bind(self, names: str, **defaults: Any) -> dict[str, Any]:
        """Bind the arguments to the space-separated parameter `names`."""
        order = names.split()
        bound = {name: defaults.get(name) for name in order}
        bound.update(zip(order, self.args, strict=False))
        bound.update(self.kwargs)
        return bound

    def on_meta(self) -> Any:
        """Run the function on meta tensors of the global shapes: for torch's own error on arguments that do not fit."""
        stand_ins = {
            id(t): torch.empty(s.shape, dtype=t.dtype, device="meta")
            for t, s in zip(self.operands, self.specs, strict=True)
        }
        args, kwargs = tree_map(lambda v: stand_ins.get(id(v), v), (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def operand_index(self, value: Any) -> int:
        """Position of a tensor argument among the operands."""
        return next(i for i, t in enumerate(self.operands) if t is value)


def function_name(func: Any) -> str:
    """Readable name of a torch function; attribute getters are called by their attribute."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def normalize_dim(dim: int, ndim: int) -> int:
    """Turn a possibly negative dim into a position; a 0-d tensor has the dims 0 and -1."""
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")
    return dim % bound


def normalize_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Turn None (all), an int or a sequence of ints into positions."""
    if dim is None:
        return tuple(range(ndim))
    if isinstance(dim, list | tuple):
        return tuple(normalize_dim(d, ndim) for d in dim)
    return (normalize_dim(dim, ndim),)


def first_dtensor(values: Sequence[Any]) -> DTensor | None:
    """The first DTensor among `values`."""
    from .._tensor import DTensor

    return next((v for v in values if isinstance(v, DTensor)), None)
