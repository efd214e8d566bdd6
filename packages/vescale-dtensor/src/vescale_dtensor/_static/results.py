"""What a call returns, apart from its tensors: nested containers and objects, made again for each call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Shape", "Shapeless"]

DEEPEST = 8
"""How far objects in objects are followed."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type)


class Shapeless(Exception):
    """A result that cannot be made again."""


class Shape:
    """A result without its tensors.

    Args:
        result: of a call.
        depth: of objects around it.

    Raises:
        Shapeless: a part of it is neither a tensor, a plain value, nor a container or object that holds only these.
    """

    def __init__(self, result: Any, depth: int = 0) -> None:
        leaves, tree = tree_flatten(result)
        self.tree: TreeSpec = tree
        self.tensors: list[Tensor] = []
        """All tensors, in order."""
        self.objects: list[weakref.ref[Any]] = []
        """Those whose attributes hold tensors, as long as others have them."""
        self._leaves: list[Any] = []
        for leaf in leaves:
            self._leaves.append(self._leaf(leaf, depth))
        self._alone = tree.is_leaf() and self._leaves[0] is _TENSOR

    def _leaf(self, leaf: Any, depth: int) -> Any:
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            return _TENSOR
        if isinstance(leaf, _PLAIN):
            return leaf
        attributes = getattr(leaf, "__dict__", None)
        slotted = any(getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__)
        if not isinstance(attributes, dict) or callable(leaf) or slotted or depth > DEEPEST:
            raise Shapeless(f"it returns a {type(leaf).__name__}")
        if isinstance(leaf, torch.nn.Module) or type(leaf).__module__.partition(".")[0] in ("torch", "builtins"):
            raise Shapeless(f"it returns a {type(leaf).__name__}")
        if type(leaf).__weakrefoffset__ == 0:  # whether it lives on cannot be told
            raise Shapeless(f"it returns a {type(leaf).__name__}")
        inside = _Object(type(leaf), Shape(dict(attributes), depth + 1))
        self.tensors += inside.shape.tensors
        self.objects += [weakref.ref(leaf), *inside.shape.objects]
        return inside

    def key(self) -> Any:
        """Return what is equal where results differ in their tensors only."""
        return repr(self.tree), [leaf.key() if isinstance(leaf, _Object) else repr(leaf) for leaf in self._leaves]

    def shares(self, other: Shape) -> bool:
        """Whether an object is part of both results."""
        mine = {id(one) for reference in self.objects if (one := reference()) is not None}
        return any(id(reference()) in mine for reference in other.objects)

    def forget(self) -> None:
        """Let the tensors go."""
        self.tensors = []
        for leaf in self._leaves:
            if isinstance(leaf, _Object):
                leaf.shape.forget()

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return a result with other tensors."""
        return tensors[0] if self._alone else self._fill(iter(tensors))

    def _fill(self, rest: Iterator[Tensor]) -> Any:
        leaves = []
        for leaf in self._leaves:
            if leaf is _TENSOR:
                leaves.append(next(rest))
            elif isinstance(leaf, _Object):
                made: Any = object.__new__(leaf.cls)
                made.__dict__.update(leaf.shape._fill(rest))
                leaves.append(made)
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, self.tree)


class _Object:
    """An object of Python: its class, and its attributes."""

    __slots__ = ("cls", "shape")

    def __init__(self, cls: type, shape: Shape) -> None:
        self.cls, self.shape = cls, shape

    def key(self) -> Any:
        """Return what is equal where objects differ in their tensors only."""
        return self.cls, self.shape.key()


class _Hole:
    """Stands for a tensor."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Hole()
