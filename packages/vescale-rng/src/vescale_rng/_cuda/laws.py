"""How a draw of a CUDA random operator maps elements to words: layout, unroll, increments and splits.

Three layouts. "grid": the kernels of torch's TensorIterator, thread = i % T, of each call the lane (i // T) % unroll.
"vector": fused dropout, where a thread takes `unroll` neighbouring elements. "apply": bernoulli with a tensor of
chances, where four neighbours share a subsequence of their own.

Source: ATen/native/cuda/DistributionTemplates.h of torch 2.11 to 2.13, and Dropout.cu.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._streams.modes import plain_torch
from ..errors import UnsupportedRandomOperatorError
from .profile import DeviceProfile

__all__ = [
    "KERNELS",
    "Law",
    "dropout_scale",
    "law_of",
    "logical_order",
    "logical_positions",
    "pieces",
    "random_range",
    "vector_size",
]

KERNELS = frozenset("uniform_ normal_ log_normal_ exponential_ cauchy_ geometric_ bernoulli_ random_ dropout".split())
"""Kernels that are modelled: in-place methods of `torch.Tensor`, and "dropout", the keep mask of `native_dropout`."""
CALL = 4
"""A call of the generator takes four words, so a thread's offset moves by four."""
APPLY_INCREMENT = 12
"""bernoulli_(tensor) reserves 10 words; increments are rounded up to a multiple of four."""
WIDE_RANGE = 1 << 28
"""random_ takes 64 bits per element from this range on."""
INDEX_LIMIT = 2**31 - 1

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALF)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys("uniform_ normal_ log_normal_ exponential_ cauchy_ dropout".split(), _FLOATS),
    "geometric_": (*_FLOATS, *_INTEGERS),
    "bernoulli_": (*_FLOATS, *_INTEGERS, torch.bool),
    "random_": (*_FLOATS, *_INTEGERS, torch.bool),
}


@dataclass(frozen=True, slots=True)
class Law:
    """How the elements of one draw stand in the stream."""

    kernel: str
    dtype: torch.dtype
    layout: Literal["grid", "vector", "apply"]
    unroll: int
    """Elements per call ("grid"), or neighbours per thread and step ("vector", "apply")."""

    @property
    def calls(self) -> int:
        """Calls of the generator per step of a thread."""
        return -(-self.unroll // 4)

    def round_numel(self, threads: int) -> int:
        """Elements that all threads produce in one step."""
        return self.unroll * threads

    def round_offset(self) -> int:
        """Words that a step moves each thread's offset by."""
        return CALL * self.calls

    def increment(self, numel: int, profile: DeviceProfile) -> int:
        """Words that one launch for `numel` elements reserves of the generator's offset."""
        if numel == 0:
            return 0
        if self.layout == "apply":
            return APPLY_INCREMENT
        # Dropout reserves for unroll 4 whatever its vector size is: with 2 it takes more than it reserved
        # (pytorch issue 68909), and the next operator overlaps.
        unroll = 4 if self.layout == "vector" else self.unroll
        return CALL * (-(-numel // (profile.threads(numel) * unroll)))


def law_of(kernel: str, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], args: tuple[Any, ...]) -> Law:
    """Find the law of a draw.

    Args:
        kernel: one of `KERNELS`.
        dtype: of the result; for "dropout" of the operator's input.
        shape: of the whole tensor.
        stride: of the whole tensor, elements; for "dropout" of the operator's input.
        args: of the kernel. "dropout" takes `(p,)` or `(p, vector)`, where the input is not aligned to 16 bytes.

    Raises:
        UnsupportedRandomOperatorError: for an operator or dtype without a model.

    >>> law_of("uniform_", torch.float64, (8,), (1,), ()).unroll
    2
    >>> law_of("dropout", torch.bfloat16, (8,), (1,), (0.1,)).unroll
    8
    """
    if kernel not in KERNELS:
        raise UnsupportedRandomOperatorError(
            f"{kernel}: what a GPU draws for this operator is not modelled. Modelled: {', '.join(sorted(KERNELS))}"
        )
    ranged = kernel == "random_" and bool(args)
    if dtype not in _DTYPES[kernel] and not (ranged and dtype in _UNSIGNED):
        hint = "; complex numbers are drawn as pairs of real ones (view_as_real)" if dtype.is_complex else ""
        raise UnsupportedRandomOperatorError(f"{kernel} on a GPU: dtype={dtype} is not supported{hint}")
    if kernel == "dropout":
        return _dropout_law(dtype, shape, stride, args)
    if kernel == "bernoulli_" and args and isinstance(args[0], Tensor):
        return Law(kernel, dtype, "apply", 4)
    if kernel == "random_":
        wide = dtype in (torch.int64, torch.float64)
        if ranged:
            width = random_range(dtype, args)[1]
            wide = width >= WIDE_RANGE
            if width == 1 << 64 and dtype not in (torch.int64, torch.float64, torch.float32, torch.bfloat16):
                raise UnsupportedRandomOperatorError(
                    f"random_(-2**63, None) on a GPU: dtype={dtype} is not int64, float64, float32 or bfloat16"
                )
        return Law(kernel, dtype, "grid", 2 if wide else 4)
    return Law(kernel, dtype, "grid", 2 if dtype == torch.float64 else 4)


def _dropout_law(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], args: tuple[Any, ...]) -> Law:
    vector = args[1] if len(args) > 1 else vector_size(dtype, shape, stride)
    if vector == 1:
        return Law("dropout", dtype, "grid", 4)
    if vector not in (2, 4, 8):
        raise UnsupportedRandomOperatorError(f"dropout on a GPU: vector size {vector} is none of 1, 2, 4, 8")
    return Law("dropout", dtype, "vector", vector)


def vector_size(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], address: int = 0) -> int:
    """Neighbouring elements that fused dropout handles per thread and step.

    Args:
        dtype: of the input.
        shape: of the input.
        stride: of the input, elements.
        address: of its first element, bytes; memory that torch allocates is aligned enough for any size.
    """
    if not _is_dense(shape, stride):
        return 1
    size = dtype.itemsize
    numel = math.prod(shape)
    vector = 16 // size
    while vector > 1 and (address % (vector * size) or numel % vector):
        vector //= 2
    return vector


def dropout_scale(p: float, dtype: torch.dtype) -> float:
    """What fused dropout multiplies the kept elements by, in the type that it accumulates in.

    The chance to keep is rounded to that type first, so this is not always 1 / (1 - p).

    Args:
        p: chance of a zero, less than 1.
        dtype: of the input.
    """
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    keep = torch.tensor(1.0 - p, dtype=torch.float64, device="cpu").to(acc).to(torch.float64)
    return float((1.0 / keep).to(acc))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return True


def logical_order(law: Law, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a draw takes the elements in logical order, and memory order is another one.

    Fused dropout does so where it takes one element at a time: for gaps in memory, and for odd numbers of elements.

    Args:
        law: of the draw.
        shape: of the whole tensor.
        stride: of the whole tensor, elements.
    """
    if law.kernel != "dropout" or law.layout != "grid":
        return False
    steps = [s for s, n in zip(stride, shape, strict=True) if n != 1]
    return any(a < b for a, b in itertools.pairwise(steps))


def logical_positions(start: int, stop: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Places in logical order of the elements `[start, stop)` in memory order, int64.

    >>> logical_positions(0, 6, (2, 3), (1, 2)).tolist()  # of a transposed tensor
    [0, 3, 1, 4, 2, 5]
    """
    rest = torch.arange(start, stop, device="cpu")
    found = torch.zeros_like(rest)
    for dim in sorted(range(len(shape)), key=lambda d: stride[d]):
        found += rest % shape[dim] * math.prod(shape[dim + 1 :])
        rest //= shape[dim]
    return found


# ------------------------------------------------------------------ random_


def random_range(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[int, int]:
    """What is added to a remainder, and the divisor, of `random_(to)`, `random_(from, to)` or `random_(from, None)`.

    Floating-point types move both ends to values that they can hold, as torch does before it draws.

    Raises:
        RuntimeError: for an empty range, as torch.
    """
    with plain_torch():
        return _random_range(dtype, *((0, args[0]) if len(args) == 1 else args))


def _random_range(dtype: torch.dtype, low: int, high: int | None) -> tuple[int, int]:
    digits = _DIGITS.get(dtype)
    if high is not None:
        if digits is not None:
            low, high = _round_low(low, dtype, digits), _round_high(high, dtype, digits)
        if low >= high:
            raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
        return low, high - low
    if low == -(1 << 63):
        return 0, 1 << 64  # all 64 bits, read as a signed number: nothing is added
    if digits is not None:
        return _round_low(low, dtype, digits), (1 << digits) - _round_low(low, dtype, digits) + 1
    top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    return low, top - low + 1


_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _round_low(low: int, dtype: torch.dtype, digits: int) -> int:
    rounded = float(torch.tensor(low + 1).to(dtype))
    if math.isinf(rounded) or int(rounded) >= low:
        return low
    return int(rounded) + (1 << (abs(low + 1).bit_length() - digits))


def _round_high(high: int, dtype: torch.dtype, digits: int) -> int:
    rounded = float(torch.tensor(high - 1).to(dtype))
    if math.isinf(rounded) or int(rounded) < high:
        return high
    return int(rounded) - (1 << (abs(high - 1).bit_length() - digits))


# ------------------------------------------------------------------ tensors beyond 32-bit indexing


def pieces(
    law: Law, shape: Sequence[int], stride: Sequence[int], profile: DeviceProfile
) -> tuple[list[tuple[int, int, int]], int]:
    """Launches of a draw.

    A tensor that 32-bit offsets in bytes cannot index is halved, front first, until they can; each piece is then a
    draw of its own, after the offset has been advanced for the whole once.

    Args:
        law: of the draw.
        shape: of the whole tensor.
        stride: of the whole tensor, elements.
        profile: of the GPU.

    Returns:
        `(start, numel, offset)` of each launch, the offset relative to the generator's, and the sum of all increments.

    Raises:
        UnsupportedRandomOperatorError: for a tensor of that size with gaps in memory.
    """
    numel = math.prod(shape)
    total = law.increment(numel, profile)
    if law.layout == "apply" or law.kernel == "dropout" or numel == 0:
        return [(0, numel, 0)], total
    size = law.dtype.itemsize
    extent = 1 + size * sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if numel <= INDEX_LIMIT and extent <= INDEX_LIMIT:
        return [(0, numel, 0)], total
    if not _is_dense(shape, stride):
        raise UnsupportedRandomOperatorError(
            f"{law.kernel} on a GPU: shape={tuple(shape)} with strides {tuple(stride)} is too large for 32-bit offsets "
            "and has gaps in memory; draw into a contiguous tensor"
        )
    found: list[tuple[int, int, int]] = []
    waiting = [(0, numel)]
    while waiting:
        start, count = waiting.pop()
        if count <= INDEX_LIMIT and 1 + size * (count - 1) <= INDEX_LIMIT:
            found.append((start, count, total))
            total += law.increment(count, profile)
        else:
            front = count // 2
            waiting += [(start + front, count - front), (start, front)]
    return found, total
