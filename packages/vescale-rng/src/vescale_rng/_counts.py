"""How far a random operator moves a generator: `draws` counts, `advance` moves without drawing.

For ranks that sit out an operator (a pipeline stage elsewhere, a sub-mesh) and must stay in step with one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._draw.fill import source_of
from ._draw.forms import off_cpu, real_args, resolve
from ._draw.source import Sampler, Source
from ._draw.who import who_draws
from ._layout import Part

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
        waiting: whether the generator holds the second number of a pair: what `Stream(generator).waiting` tells.

    Raises:
        UnsupportedRandomOperatorError: if the count depends on data.

    >>> draws("rand", (3, 5)), draws("randn", (100,)), draws("dropout", (3, 5), 0.1)
    (15, 116, 30)
    """
    if _draws_nothing(op, shape, args):
        return 0
    generator = torch.Generator()
    if waiting:
        torch.empty(1, device="cpu").normal_(generator=generator)
    source = source_of(op, tuple(shape), _dtype(op, dtype), args, stride, generator)
    return int(source.words_total())


def advance(
    generator: Any,
    op: str,
    shape: Sequence[int],
    *args: Any,
    dtype: torch.dtype | None = None,
    stride: Sequence[int] | None = None,
) -> None:
    """Move a generator as an operator on one device would, without drawing.

    Args:
        generator: a `torch.Generator` of the CPU or of a GPU, or what `portable` or `emulate_cuda` gave. Within such a
            block torch's default generator is the block's.
        op: as for `draws`.
        shape: of the whole tensor.
        *args: parameters of the distribution.
        dtype: of the result; the default dtype by default (int64 for "randint").
        stride: strides of the whole tensor; contiguous by default.

    Raises:
        UnsupportedRandomOperatorError: if the count depends on data.
        TypeError: if `generator` is none.

    >>> g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    >>> advance(g, "randn", (1000, 3))
    >>> _ = torch.randn(1000, 3, generator=h)
    >>> torch.equal(g.get_state(), h.get_state())
    True
    """
    if generator is None:
        raise TypeError("generator: expected a generator, got None; give torch.default_generator, or that of a GPU")
    who = who_draws(generator)
    if _draws_nothing(op, shape, args):
        return
    call = (op, tuple(shape), _dtype(op, dtype), args, stride)
    if who is None or isinstance(who, torch.Generator):
        source_of(*call, generator).finish()
    else:
        _source_of_sampler(*call, who).finish()


def _draws_nothing(op: str, shape: Sequence[int], args: tuple[Any, ...]) -> bool:
    """Tell whether it is a dropout of nothing, or one that keeps or drops everything: torch asks for no mask then."""
    return op == "dropout" and (args in ((0,), (1,)) or math.prod(shape) == 0)


def _source_of_sampler(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    args: tuple[Any, ...],
    stride: Sequence[int] | None,
    sampler: Sampler,
) -> Source:
    part = Part.whole(shape, stride)
    form = resolve(op, args, {})
    shape, strides = part.global_shape, part.global_stride
    if dtype.is_complex:  # drawn as its real view
        form, dtype = real_args(form), dtype.to_real()
        shape, strides = (*shape, 2), (*(2 * s for s in strides), 1)
    kernel, given = off_cpu(form)
    return sampler.source(kernel, dtype, torch.device("cpu"), shape, strides, given)


def _dtype(op: str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.int64 if op.startswith("randint") else torch.get_default_dtype()
