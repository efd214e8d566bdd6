"""Choice of the law for a draw on a CPU, and the check that this machine's torch keeps it.

Laws are facts about torch's kernels (verified on 2.13) and not promises of torch. So the first use of each kernel with
each dtype tries the law on a few dozen elements; a kernel that does not keep it is drawn whole, which is always right.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._streams.advance import advance_words
from .._streams.modes import plain_torch
from .cpu_sources import BLOCK, Blocks, Even, Pairs, run_kernel, words_taken
from .source import Source

__all__ = ["cpu_source", "law_holds"]

logger = logging.getLogger("vescale_rng")

_HALF = (torch.float16, torch.bfloat16)


def cpu_source(
    kernel: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    args: tuple[Any, ...],
    generator: torch.Generator,
) -> Source | None:
    """Return the source of a draw, or None if this torch keeps none of the known laws: draw it whole then.

    Args:
        kernel: in-place method of `torch.Tensor`.
        dtype: real dtype of the tensor that is filled.
        shape: of the whole tensor.
        stride: of the whole tensor, in elements.
        args: arguments of the kernel.
        generator: of the CPU.
    """
    key = args
    for a in args:
        if isinstance(a, Tensor):
            key = tuple(a.dtype if isinstance(a, Tensor) else a for a in args)
            break
    make, numel, words = _chosen(kernel, dtype, shape, stride, key)
    return None if make is None else make(kernel, dtype, numel, args, generator, words)


_Make = Callable[[str, torch.dtype, int, tuple[Any, ...], torch.Generator, int], Source]


@functools.lru_cache(maxsize=8192)
def _chosen(
    kernel: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], key: tuple[Any, ...]
) -> tuple[_Make | None, int, int]:
    """Choose a law: what makes a source by it (None: no law), the elements, and the words that an even law needs."""
    numel = math.prod(shape)
    law = _law(kernel, numel, is_contiguous(shape, stride))
    words = _words(kernel, dtype, key)  # also for the other laws: a rank that holds nothing must refuse wrong arguments
    if law != "even":
        words = 0
    trusted = _trusted(law, kernel, dtype, words, any(isinstance(a, torch.dtype) for a in key))
    return _MAKE[law] if trusted else None, numel, words


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether torch calls a tensor of such strides contiguous."""
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def _law(kernel: str, numel: int, contiguous: bool) -> str:
    if kernel == "log_normal_":
        return "pairs"
    if kernel == "normal_":
        return "blocks" if numel >= BLOCK and contiguous else "pairs"
    return "even"


def _even(
    kernel: str, dtype: torch.dtype, numel: int, args: tuple[Any, ...], generator: torch.Generator, words: int
) -> Source:
    return Even(kernel, numel, args, generator, words)


def _blocks(
    kernel: str, dtype: torch.dtype, numel: int, args: tuple[Any, ...], generator: torch.Generator, words: int
) -> Source:
    return Blocks(numel, args, generator, 2 if dtype == torch.float64 else 1, dtype in _HALF)


def _pairs(
    kernel: str, dtype: torch.dtype, numel: int, args: tuple[Any, ...], generator: torch.Generator, words: int
) -> Source:
    return Pairs(kernel, numel, args, generator)


_MAKE: dict[str, _Make] = {"even": _even, "blocks": _blocks, "pairs": _pairs}


@functools.lru_cache(maxsize=4096)
def _words(kernel: str, dtype: torch.dtype, key: tuple[Any, ...]) -> int:
    with plain_torch():
        args = tuple(torch.empty(1, dtype=a, device="cpu") if isinstance(a, torch.dtype) else a for a in key)
        return words_taken(kernel, dtype, args)


# ------------------------------------------------------------------ does this torch keep the law?

_TRIAL_ARGS: dict[str, tuple[Any, ...]] = {"bernoulli_": (0.3,), "geometric_": (0.3,), "random_": (0, 100)}
_TRIALS = ((37, ((0, 5), (16, 21), (22, 37))), (48, ((7, 40),)), (20, ()))
"""Sizes of trial tensors, and ranges of them that are produced."""


@functools.lru_cache(maxsize=1024)
def _trusted(law: str, kernel: str, dtype: torch.dtype, words: int, tensor_args: bool) -> bool:
    with plain_torch():  # a mode of the caller must not see, fake or count the trial
        broken = law_holds(law, kernel, dtype, words, tensor_args)
    if broken:
        logger.warning(
            "torch %s does not draw %s of %s as vescale_rng knows it (%s); it is drawn whole on every rank, which is "
            "right but slow. `python -m vescale_rng doctor` says more",
            torch.__version__, kernel, dtype, broken,
        )  # fmt: skip
    return not broken


def law_holds(law: str, kernel: str, dtype: torch.dtype, words: int = 0, tensor_args: bool = False) -> str:
    """Try a law on small tensors against torch's own kernel; return what differs, "" for nothing."""
    with torch.no_grad():
        for numel, ranges in _TRIALS:
            broken = _trial(law, kernel, dtype, words, tensor_args, numel, ranges)
            if broken:
                return broken
    return ""


def _trial(law: str, kernel: str, dtype: torch.dtype, words: int, tensor_args: bool, numel: int, ranges: Any) -> str:
    args = _TRIAL_ARGS.get(kernel, ())
    if kernel == "random_":
        args = _integer_trial(dtype, words)
    if tensor_args:
        args = (torch.linspace(0.1, 0.9, numel, dtype=torch.float64 if words == 2 else torch.float32, device="cpu"),)
    whole_generator, generator = torch.Generator(), torch.Generator()
    for g in (whole_generator, generator):
        g.manual_seed(11)
        advance_words(g, 7)
    whole = _whole(law, kernel, dtype, numel, args, whole_generator)
    source = _MAKE[law](kernel, dtype, numel, args, generator, words)
    high = 0
    for start, stop in ranges:
        low, high = max(high, start - start % source.grain), min(numel, -(-stop // source.grain) * source.grain)
        got = torch.empty(high - low, dtype=dtype, device="cpu")
        source.emit(got, low, tuple(a[low:high] if isinstance(a, Tensor) else a for a in args))
        if not torch.equal(got, whole[low:high]):
            return f"elements {low} to {high} of {numel} differ"
    source.finish()
    if not torch.equal(generator.get_state(), whole_generator.get_state()):
        return f"the generator's state after {numel} elements differs"
    return ""


def _integer_trial(dtype: torch.dtype, words: int) -> tuple[int, ...]:
    """Arguments with which `random_` takes `words` words per element of a dtype."""
    try:
        if _words("random_", dtype, ()) == words:
            return ()
    except NotImplementedError:  # unsigned types of more than 8 bits have no range of their own
        pass
    return (0, 100) if words == 1 else (0, 1 << 30)


def _whole(
    law: str, kernel: str, dtype: torch.dtype, numel: int, args: tuple[Any, ...], generator: torch.Generator
) -> Tensor:
    strided = law == "pairs" and kernel == "normal_"
    out = (
        torch.empty(2 * numel, dtype=dtype, device="cpu")[::2]
        if strided
        else torch.empty(numel, dtype=dtype, device="cpu")
    )
    run_kernel(kernel, out, args, generator)
    return out
