"""What the walk over local elements needs of a stream of random numbers.

A source stands for one random operator on one whole tensor. It can produce any range of the elements, counted in the
memory order of the whole tensor, because it knows where in the stream each range begins.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Sampler", "Source"]


class Source(Protocol):
    """One draw of `numel` elements, of which ranges are produced in rising order."""

    numel: int
    """Elements of the whole tensor."""
    grain: int
    """Ranges begin at a multiple of this; they end at one, or at `numel`."""
    seek_cost: float
    """Cost of beginning a range that does not follow the one before, in units of one produced element."""
    skip_cost: float
    """Cost of passing over one element, in the same unit; 0 where seeking does not depend on the distance."""

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Write the elements `[start, start + len(out))` into a contiguous 1-D tensor.

        Args:
            out: of the dtype and device of the draw.
            start: index in memory order of the whole tensor; never before the end of the last range.
            params: parameters of the distribution; tensors among them are 1-D, contiguous and of `len(out)`.
        """

    def finish(self) -> None:
        """Leave the generator where one device would after the whole draw; called once, also after no `emit`."""


class Sampler(Protocol):
    """Makes sources in place of torch's generators: an emulated GPU, or a portable stream."""

    def source(
        self,
        op: str,
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        args: tuple[Any, ...],
    ) -> Source:
        """Begin a draw.

        Args:
            op: aten base name: "uniform_", "normal_", "bernoulli_", "dropout" (a keep mask), ...
            dtype: of the result.
            device: of the result.
            shape: of the whole tensor.
            stride: of the whole tensor, in elements.
            args: parameters of the distribution.

        Raises:
            UnsupportedRandomOperatorError: if the sampler does not know the operator.
        """

    def save(self) -> object:
        """Return the state, for `restore`."""

    def restore(self, token: object) -> None:
        """Go back to a state, after a draw that failed."""
