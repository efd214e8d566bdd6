"""Hooks on parameters, and the one order of buckets of several lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CommError
from .bucket import Bucket
from .member import Member

__all__ = ["Hooks", "in_one_order"]


_reduced: Any = WeakIdKeyDictionary()
"""Parameters that have hooks, and what put them there."""


class Hooks:
    """The hooks on some parameters."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def renew(self, members: Sequence[Member]) -> None:
        """Remove all hooks, to put others on parameters that nothing else reduces.

        Raises:
            CommError: something does.
        """
        for member in members:
            other = _reduced.get(member.param)
            if other is not None and other is not self and other._handles:
                raise CommError(
                    f"{member.name}: its gradient is reduced already, by data parallelism or a sharded optimizer. "
                    "Use one of them, or close() the other one first."
                )
        self.remove()

    def put(self, bucket: Bucket, member: Member, after: Callable[[Tensor], None]) -> None:
        """Put hooks on a parameter, also on a frozen one.

        Args:
            bucket: of the parameter.
            member: the parameter.
            after: called after autograd added to its gradient.
        """
        param: Any = member.param
        _reduced[param] = self
        trains = param.requires_grad
        param.requires_grad_(True)
        try:
            self._handles.append(param.register_post_accumulate_grad_hook(after))
            if bucket.apart:
                self._handles.append(param.register_hook(partial(_before, bucket, member)))
        finally:
            param.requires_grad_(trains)

    def remove(self) -> None:
        """Remove them all."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _before(bucket: Bucket, member: Member, _: Tensor) -> None:
    bucket.put_aside(member)


def in_one_order(lanes: Sequence[Sequence[Bucket]]) -> list[Bucket]:
    """Put the buckets of all lanes in one order, by how far each is in its own lane.

    Args:
        lanes: per lane, its buckets in their order.
    """
    placed = [
        ((number + 1) / len(buckets), lane, bucket)
        for lane, buckets in enumerate(lanes)
        for number, bucket in enumerate(buckets)
    ]
    return [bucket for _, _, bucket in sorted(placed, key=lambda one: one[:2])]
