"""Copies that stand for views: what to do where one tensor should see a write into another, and would not.

A function that gives a view gives a copy where its argument had to move. Reading such a copy is
right until one of the two is written to. A write into the copy is refused. A write into the tensor
that it copies makes the copy *stale*: from then on reading it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from .._tensor import DTensor
from ..errors import UnsupportedOperationError

_run = torch._C._disabled_torch_function_impl
base_of: Any = torch._C.TensorBase._base.__get__  # type: ignore[union-attr]

copies_of_views: Any = WeakTensorKeyDictionary()
"""For tensors that were viewed by copies: these copies. Empty in programs whose views move nothing."""


def _memory(x: Tensor) -> Tensor:
    """The tensor that `x` is a view of, or `x`: one object for all that share the memory."""
    base = _run(base_of, (), (x,), {})
    return x if base is None else base


def _alive(copies: list[TensorWeakRef]) -> Iterator[tuple[TensorWeakRef, Any]]:
    for ref in copies:
        copy = ref()
        if copy is not None:
            yield ref, copy


def mark_copies(r: Any, name: str, source: Tensor) -> Any:
    """Remember that the results `r` of function `name` stand for views of `source` but are copies."""
    items = (r,) if isinstance(r, Tensor) else tuple(r)
    for item in items:
        for x in (item, _memory(item)):  # views of the item have its base
            x.__dict__["_copy_of_view"] = name
    key = _memory(source)
    copies_of_views[key] = [ref for ref, _ in _alive(copies_of_views.get(key, []))] + list(map(TensorWeakRef, items))
    return r


def before_write(target: Any, writer: str) -> None:
    """Call before changing `target` in place: copies of it become stale.

    Raises:
        UnsupportedOperationError: `target` is a copy that stands for a view.
    """
    if not copies_of_views or not isinstance(target, DTensor):
        return
    memory = _memory(target)
    made_by = target.__dict__.get("_copy_of_view") or memory.__dict__.get("_copy_of_view")
    if made_by is not None:
        raise UnsupportedOperationError(
            f"{writer} writes into the result of {made_by}, which on one device is a view, but here is a copy: "
            f"{made_by} had to move the sharded tensor that it views, so the write would not reach that tensor. "
            "Assign with x[index] = value, or redistribute the tensor first, or clone() the result if the tensor "
            "need not change"
        )
    for _, copy in _alive(copies_of_views.pop(memory, [])):
        copy.__dict__["_written_by"] = writer
        copy.__class__ = _Stale


class _Stale(DTensor):
    """A copy that lacks a later write into what it should be a view of."""

    @property
    def _spec(self) -> Any:
        made_by, writer = self.__dict__["_copy_of_view"], self.__dict__["_written_by"]
        raise UnsupportedOperationError(
            f"this result of {made_by} on one device is a view, but here is a copy, because {made_by} had to move the "
            f"sharded tensor that it views; {writer} has written into that tensor since, which the copy does not show. "
            f"Call {made_by} again after the write, or clone() its result if it should keep the old values"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .engine import tensors_in

        return next(t for t in tensors_in(args, kwargs) if isinstance(t, _Stale))._spec


__all__ = ["base_of", "before_write", "copies_of_views", "mark_copies"]
