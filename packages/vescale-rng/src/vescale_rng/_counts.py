"""How far a random operator moves a generator: `draws` counts, `advance` moves without drawing.

For ranks that sit out an operator (a pipeline stage elsewhere, a sub-mesh) and must stay in step with one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._draw.fill import source_of

__all__ = ["advance", "draws"]


def draws(
    op: str,
    shape: Sequence[int],
    *args: Any,
    dtype: torch.dtype | None = None,
    stride: Sequence[int] | None = None,
    waiting: bool = False,
) -> int:
    """Count the raw 32-bit numbers that an operator takes from a CPU generator.

    Args:
        op: aten base name of a closed-form operator, as for `draw`; "dropout" for the dropouts (`args == (p,)`), which
            draw nothing for p = 0 and p = 1.
        shape: of the whole tensor; for dropout of whole channels that of the mask, `(N, C, 1, ...)`.
        *args: parameters of the distribution.
        dtype: of the result; the default dtype by default (int64 for "randint").
        stride: strides of the whole tensor; contiguous by default. Normal numbers of strided tensors come in pairs.
        waiting: whether the generator holds the second number of a pair (`Stream.waiting` tells).

    Raises:
        UnsupportedRandomOperatorError: if the count depends on data.

    >>> draws("rand", (3, 5)), draws("randn", (100,)), draws("dropout", (3, 5), 0.1)
    (15, 116, 30)
    """
    if _draws_nothing(op, args):
        return 0
    generator = torch.Generator()
    if waiting:
        torch.empty(1, device="cpu").normal_(generator=generator)
    source = source_of(op, tuple(shape), _dtype(op, dtype), args, stride, generator)
    return int(source.words_total())


def advance(
    generator: torch.Generator,
    op: str,
    shape: Sequence[int],
    *args: Any,
    dtype: torch.dtype | None = None,
    stride: Sequence[int] | None = None,
) -> None:
    """Move a generator as an operator on one device would, without drawing.

    Args:
        generator: of the CPU or of a GPU.
        op: as for `draws`.
        shape: of the whole tensor.
        *args: parameters of the distribution.
        dtype: of the result; the default dtype by default (int64 for "randint").
        stride: strides of the whole tensor; contiguous by default.

    Raises:
        UnsupportedRandomOperatorError: if the count depends on data.

    >>> g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    >>> advance(g, "randn", (1000, 3))
    >>> _ = torch.randn(1000, 3, generator=h)
    >>> torch.equal(g.get_state(), h.get_state())
    True
    """
    if not _draws_nothing(op, args):
        source_of(op, tuple(shape), _dtype(op, dtype), args, stride, generator).finish()


def _draws_nothing(op: str, args: tuple[Any, ...]) -> bool:
    """Tell whether it is a dropout that keeps or drops everything: torch asks for no mask then."""
    return op == "dropout" and args in ((0,), (1,))


def _dtype(op: str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.int64 if op.startswith("randint") else torch.get_default_dtype()
