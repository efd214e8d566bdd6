"""The doctor's own table of how many random words torch's operators take, written apart from what draws with it.

Verified on torch 2.13 by comparing generator states. A word is one 32-bit number of the CPU generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["After", "Law", "cuda_increment", "cuda_unroll", "fixed", "integers", "normal", "paired", "per_width"]

After: TypeAlias = "tuple[int, bool]"
"""(words taken, whether a normal number waits in the generator afterwards)."""
Law: TypeAlias = "Callable[[int, torch.dtype, bool, bool], After]"
"""From (numel, dtype, contiguous, whether a normal number waits before) to what follows."""

_HALF = (torch.bfloat16, torch.float16)


def fixed(words: int) -> Law:
    """So many words per element, for every dtype."""
    return lambda numel, dtype, contiguous, waits: (words * numel, waits)


def per_width(numel: int, dtype: torch.dtype, contiguous: bool, waits: bool) -> After:
    """One word per real number of up to 32 bits, two for 64 bits.

    >>> per_width(10, torch.complex128, True, False)
    (40, False)
    """
    reals = 2 if dtype.is_complex else 1
    return numel * reals * (2 if dtype in (torch.float64, torch.complex128) else 1), waits


def integers(numel: int, dtype: torch.dtype, contiguous: bool, waits: bool) -> After:
    """`random_()` without bounds: two words for the dtypes whose numbers do not fit into one."""
    return numel * (2 if dtype in (torch.int64, torch.float64) else 1), waits


def normal(numel: int, dtype: torch.dtype, contiguous: bool, waits: bool) -> After:
    """Blocks of 16 for contiguous tensors of at least 16 numbers, else pairs.

    >>> normal(17, torch.float32, True, False), normal(17, torch.bfloat16, True, False)
    ((33, False), (32, False))
    >>> normal(5, torch.float32, True, False), normal(5, torch.float32, True, True)
    ((12, True), (8, False))
    """
    if dtype.is_complex:
        numel, dtype = 2 * numel, torch.float64 if dtype == torch.complex128 else torch.float32
    if numel < 16 or not contiguous:
        return paired(numel, dtype, contiguous, waits)
    if dtype in _HALF:
        return -(-numel // 16) * 16, waits
    return (numel + (16 if numel % 16 else 0)) * (2 if dtype == torch.float64 else 1), waits


def paired(numel: int, dtype: torch.dtype, contiguous: bool, waits: bool) -> After:
    """Four words for two normal numbers, the second of which may wait for the next call."""
    if numel == 0:
        return 0, waits
    needed = numel - waits
    return 4 * -(-needed // 2), bool(needed % 2)


def cuda_unroll(kernel: str, dtype: torch.dtype, words_per_element: int) -> int:
    """Elements that a thread of torch's CUDA kernels takes from one Philox block of four words."""
    wide = words_per_element == 2 if kernel == "random_" else dtype == torch.float64
    return 2 if wide else 4


def cuda_increment(numel: int, unroll: int, sms: int, threads_per_sm: int) -> int:
    """How far one draw moves the offset of a CUDA generator: 4 for each round of the whole grid, blocks of 256.

    >>> cuda_increment(4_000_000, 4, 132, 2048)  # an H100
    16
    """
    if numel == 0:
        return 0
    threads = 256 * min(-(-numel // 256), sms * (threads_per_sm // 256))
    return 4 * -(-numel // (threads * unroll))
