"""A parameter in its bucket: where its gradient lies, and when that is one that somebody else keeps.

Until a bucket is launched, `param.grad` is the truth: what the user did to it counts, whether it was zeroed, replaced
or dropped. Who keeps it keeps its numbers: memory that others still see is left to them, and not written again.
"""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CommError
from .local import is_plain, local_gradient, local_of

__all__ = ["Member", "uses"]


def uses(tensor: Tensor) -> int:
    """Return how many tensors and other objects share the memory of a tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Member:
    """A parameter in its bucket."""

    __slots__ = (
        *("axes", "base", "given", "hold", "index", "name", "param", "placed", "plain", "stays", "view", "wide"),
        *("_given_count", "_places_count"),
    )

    def __init__(self, name: str, param: Parameter, index: int, axes: tuple[int, ...]) -> None:
        self.name, self.param = name, param
        self.index = index
        """Of its flags."""
        self.axes = axes
        """Mesh axes over which its gradient comes as a pending sum."""
        self.plain = is_plain(param)
        """Whether its gradient is a tensor that may lie in a buffer."""
        self.wide = False
        """Whether the buffer has another dtype than the gradient."""
        self.hold = False
        """Whether backwards inside backwards add to it, so that its bucket waits for the end of the outermost one."""
        self.view: Tensor = torch.empty(0)
        """Its place in the buffer."""
        self.placed: Tensor = self.view
        """The same place, as `param.grad` while it holds what is not reduced yet."""
        self.given: Tensor | None = None
        """What `param.grad` becomes after the reduction; None: nothing."""
        self.base: Tensor | None = None
        """A gradient that is reduced already, to be added to the result."""
        self.stays = False
        """Whether `param.grad` was in this window what was given before: who keeps that gets to see the next one."""
        self._places_count = self._given_count = 0

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part on this rank of a tensor of the parameter's kind, such as `given`."""
        return tensor if self.plain else local_of(tensor)

    def contribution(self, grad: Tensor) -> Tensor:
        """Return what of a gradient is to be summed.

        Raises:
            CommError: no reduction can take this gradient.
        """
        if grad.requires_grad:
            raise CommError(
                f"{self.name}: its gradient has a graph, as backward(create_graph=True) leaves it, and reducing would "
                "cut it. Take second derivatives with torch.autograd.grad, or run this backward under no_sync()."
            )
        if grad.layout is not torch.strided:
            raise CommError(
                f"{self.name}: its gradient is {grad.layout}; only dense gradients are reduced. Make the module with "
                "sparse=False, or leave the parameter out of the reduction."
            )
        return grad if self.plain else local_gradient(self.name, self.param, grad, self.axes)

    def is_apart(self) -> bool:
        """Tell whether the parameter has a gradient that may be brought into the buffer, and is not there yet."""
        grad = self.param.grad
        if grad is None or grad is self.placed or grad is self.view or not self.plain:
            return False
        # What cannot be reduced is told when it is to be.
        return not grad.requires_grad and grad.layout is torch.strided

    def place(self) -> None:
        """Bring such a gradient into the buffer, while caches have it; autograd adds the next ones there."""
        grad = self.param.grad
        self.view.copy_(grad)  # type: ignore[arg-type]
        self.stays |= grad is self.given
        self._set(self.placed)

    def widen(self) -> None:
        """Have such a gradient in the dtype of the buffer, so that the next ones are added in it."""
        grad = self.param.grad
        if self.wide and grad is not None and grad.dtype != self.view.dtype:
            self.stays |= grad is self.given
            self._set(grad.to(self.view.dtype))

    def _set(self, grad: Tensor) -> None:
        if self.wide:
            self.param.grad = None
            self.param.grad_dtype = None  # users may put another one there, of either dtype
        self.param.grad = grad

    def point(self) -> None:
        """Have autograd add in the buffer from the start."""
        self._set(self.view)

    def take(self) -> None:
        """Leave no gradient at the parameter."""
        self.param.grad = None
        if self.wide and self.plain:
            self.param.grad_dtype = self.param.dtype

    def count(self) -> None:
        """Take those who hold `view`, `placed` and `given` now for all who should."""
        self._places_count = self._places()
        self._given_count = self._given()

    def _places(self) -> int:
        return getrefcount(self.view) + getrefcount(self.placed)

    def _given(self) -> int:
        given = self.given
        if given is None or given is self.view:
            return 0
        return getrefcount(given) + (0 if self.plain else uses(local_of(given)))

    def is_kept(self) -> bool:
        """Tell whether somebody else has a gradient of the buffer; not to be asked while it is `param.grad`."""
        return self._places() > self._places_count

    def is_given_kept(self) -> bool:
        """Tell whether somebody else has a gradient that was given; not to be asked while it is `param.grad`."""
        return self._given() > self._given_count
