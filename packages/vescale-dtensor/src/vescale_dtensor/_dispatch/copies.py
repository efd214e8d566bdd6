"""Copies that stand for views: what to do where one tensor should see a write into another, and would not.

A function that gives a view gives a copy where its argument had to move. Reading such a copy is
right until one of the two is written to. A write into the copy, or into a view of it, is refused. A
write into the tensor that it copies makes the copy *stale*: from then on reading it is an error. What
stays open: a view that was taken of the copy before still shows the old values.

A cast, whose gradients are summed over ranks on their way back, is the other case: it shares memory with what was cast,
but autograd would send the gradients of what is written into it past the sum. It can be written to without gradients.
Whether other tensors share a memory is never asked: ranks may answer differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from .._tensor import DTensor
from ..errors import UnsupportedOperationError

_copies: dict[int, tuple[StorageWeakRef, list[TensorWeakRef]]] = {}
"""By the address of a storage that was viewed: the copies that stand for views of it."""
_made_by: dict[int, tuple[StorageWeakRef, str]] = {}
"""By the address of a copy's storage: the function that made it. Both are empty where no view had to move."""
_limit = 256
"""Number of entries at which those of freed storages are dropped. (A weak reference keeps an address from reuse.)"""


def _storage(x: Tensor) -> StorageWeakRef:
    with torch._C.DisableTorchFunction():  # a recorder must not see it
        return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return bool(_storage(x).cdata == _storage(y).cdata)


def mark_copies(r: Any, name: str, source: Tensor) -> Any:
    """Remember that the results `r` of function `name` stand for views of `source` but are copies."""
    items = (r,) if isinstance(r, Tensor) else tuple(r)
    for item in items:
        storage = _storage(item)
        _made_by[storage.cdata] = storage, name
        item.__dict__["_copy_of_view"] = name
    storage = _storage(source)
    alive = [ref for ref in _copies.get(storage.cdata, (None, ()))[1] if ref() is not None]
    _copies[storage.cdata] = storage, alive + list(map(TensorWeakRef, items))
    if len(_copies) + len(_made_by) > _limit:
        _forget_freed()
    return r


def _forget_freed() -> None:
    global _limit
    tables: tuple[dict[int, Any], ...] = (_copies, _made_by)
    for table in tables:
        for address, (storage, _) in list(table.items()):
            if storage.expired():
                table.pop(address, None)
    _limit = 2 * (len(_copies) + len(_made_by)) + 256


def before_write(target: Any, writer: str) -> None:
    """Call before changing `target` in place: copies of views of it become stale.

    Raises:
        UnsupportedOperationError: `target` is a copy that stands for a view, or a view of one; or it is a cast, and
            there are gradients.
    """
    if isinstance(target, DTensor) and "_is_cast" in target.__dict__ and torch.is_grad_enabled():
        raise UnsupportedOperationError(
            f"{writer} writes into the result of a redistribution from Replicate to Varying, whose gradients are "
            "summed over ranks: with this write they would not be. Write into a clone() of it, or use the function "
            "that returns a new tensor"
        )
    if not _copies or not isinstance(target, DTensor):
        return
    address = _storage(target).cdata
    if address in _made_by:
        made_by = _made_by[address][1]
        raise UnsupportedOperationError(
            f"{writer} writes into the result of {made_by}, which on one device is a view, but here is a copy: "
            f"{made_by} had to move the sharded tensor that it views, so the write would not reach that tensor. "
            "Assign with x[index] = value, or redistribute the tensor first, or clone() the result if the tensor "
            "need not change"
        )
    for ref in _copies.pop(address, (None, ()))[1]:
        copy: Any = ref()
        if copy is not None:
            copy.__dict__["_written_by"] = writer
            copy.__class__ = _Stale


class _Stale(DTensor):
    """A copy that lacks a later write into what it should be a view of."""

    @property
    def _spec(self) -> Any:  # type: ignore[override]
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


__all__ = ["before_write", "mark_copies", "share_memory"]
