"""A transport that computes what another backend would: ranks gather all buffers and add them in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._transport.interface import Work
from .choose import order_named
from .orders import Order
from .sums import all_reduce, reduce_scatter_tensor

__all__ = ["EmulatedTransport"]

_gather_bytes: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EmulatedTransport:
    """Reductions in the order of any backend, on real processes and in emulated worlds. Slow and large: for checks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from vescale_comm.emulator import emulate
        >>> def total(rank):
        ...     buffer = torch.tensor([[1e8], [-1e8], [1.0]][rank])
        ...     EmulatedTransport(dist.group.WORLD, "nccl_ring").all_reduce(buffer).wait()
        ...     return buffer.item()
        >>> emulate(total, 3)
        [0.0, 0.0, 0.0]
    """

    name = "emulated"

    def __init__(self, group: dist.ProcessGroup, order: str | Order = "canonical") -> None:
        """Take the group.

        Args:
            group: of torch.distributed; this rank must be in it.
            order: in which sums add: "canonical", "gloo", "nccl_ring", "nccl_tree" or an `Order`.
        """
        self._group, self._order = group, order_named(order)
        self.rank, self.size = group.rank(), group.size()

    @property
    def canonical(self) -> bool:
        """Whether sums add in rank order."""
        return self._order.name == "canonical"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum parts at their owners; see `Transport`."""
        own = self._part(buffer)

        def then(terms: Sequence[Tensor]) -> None:
            total = reduce_scatter_tensor(self._order, terms)[self.rank]
            own.copy_(total if divisor == 1 else total.div_(divisor))

        return self._gather(buffer, accumulate, then)

    def all_gather(self, buffer: Tensor) -> Work:
        """Send the own part to everybody; see `Transport`."""
        own = self._part(buffer).clone()

        def then(terms: Sequence[Tensor]) -> None:
            torch.cat(list(terms), out=buffer)

        return self._gather(own, None, then)

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum whole buffers; see `Transport`."""

        def then(terms: Sequence[Tensor]) -> None:
            total = all_reduce(self._order, terms)
            buffer.copy_(total if divisor == 1 else total.div_(divisor))

        return self._gather(buffer, accumulate, then)

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Send from one rank to each; see `Transport`."""
        work = dist.broadcast(_bytes(buffer), group_src=source, group=self._group, async_op=True)
        return _Gathered(work, lambda: None)

    def close(self) -> None:
        """Hold nothing, so give back nothing."""

    def _part(self, buffer: Tensor) -> Tensor:
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() % self.size:
            raise ValueError(
                f"buffer: needs one dimension, contiguous, of a length that {self.size} ranks divide; "
                f"got shape {tuple(buffer.shape)}, strides {buffer.stride()}."
            )
        return buffer.view(self.size, -1)[self.rank]

    def _gather(self, buffer: Tensor, accumulate: torch.dtype | None, then: Callable[[Sequence[Tensor]], None]) -> Work:
        """Bring the buffers of all ranks here, as bytes: backends refuse some dtypes."""
        everything = torch.empty(self.size * buffer.nbytes, dtype=torch.uint8, device=buffer.device)
        work = _gather_bytes(everything, _bytes(buffer), group=self._group, async_op=True)

        def finish() -> None:
            terms = [row.view(buffer.dtype) for row in everything.view(self.size, -1).unbind()]
            then(terms if accumulate is None else [term.to(accumulate) for term in terms])

        return _Gathered(work, finish)


class _Gathered:
    """A gather under way, and what is to be done with what it brings."""

    def __init__(self, work: dist.Work, then: Callable[[], None]) -> None:
        self._work: dist.Work | None = work
        self._then = then

    def wait(self) -> None:
        """Finish it."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._then()


def _bytes(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"buffer: must be contiguous; got strides {tensor.stride()}.")
    return tensor.view(-1).view(torch.uint8)
