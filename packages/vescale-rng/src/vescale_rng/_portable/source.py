"""One operator call of the portable stream: any range of its elements, made by itself."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .laws import Law
from .philox import philox_blocks

__all__ = ["PortableSource"]

_CPU_BLOCKS = 1 << 14
"""Blocks made at a time by one thread: the three buffers of words and the float64 temporaries then fit its cache."""
_GPU_BLOCKS = 1 << 22
_PARALLEL_GRAIN = 1 << 15
"""Elements below which torch's elementwise loops do not use a second thread."""


class PortableSource:
    """The elements of one call, in memory order of the whole tensor.

    Element i comes from block `i // grain` of the call. Chunks, threads and devices do not matter to its bits.

    Args:
        law: distribution and dtype.
        numel: elements of the whole tensor.
        seed: key, 0 <= seed < 2**64.
        call: number of the operator call, 0 <= call < 2**64.
        finished: called once, after the draw.
    """

    skip_cost = 0.0
    seek_cost = 8000.0
    """A range costs some 150 torch operations, however short it is; where it begins does not matter."""

    def __init__(self, law: Law, numel: int, seed: int, call: int, finished: Callable[[], None]) -> None:
        self.numel = numel
        self.grain = law.grain
        self.law = law
        self.seed = seed
        self.call = call
        self._finished = finished

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Write the elements `[start, start + len(out))`; `start` is a multiple of `grain`."""
        if start % self.grain:
            raise ValueError(f"start={start} has to be a multiple of {self.grain}, the elements of a block")
        if type(out) is Tensor and torch._C._len_torch_dispatch_stack():
            # `portable` itself is a dispatch mode; it would look at each of the operations below.
            with torch._C._DisableTorchDispatch():
                self._emit(out, start, params)
        else:
            self._emit(out, start, params)

    def _emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        if out.is_cuda and _has_triton():
            from .triton_kernel import launch, supports

            if supports(self.law):
                launch(self.law, out, start, self.seed, self.call)
                return
        blocks = _blocks_at_a_time(out.device)
        done = 0
        while done < len(out):
            first = (start + done) // self.grain
            # A chunk ends where the upper half of the block index changes.
            count = min(blocks, math.ceil((len(out) - done) / self.grain), (1 << 32) - (first & 0xFFFFFFFF))
            size = min(count * self.grain, len(out) - done)
            self._produce(out[done : done + size], first, count, _cut(params, done, done + size))
            done += size

    def _produce(self, out: Tensor, first: int, count: int, params: tuple[Any, ...]) -> None:
        size, full = len(out), count * self.grain
        target = out
        if size < full:
            target = out.new_empty(full)
            params = tuple(_padded(p, full) if isinstance(p, Tensor) and p.dim() else p for p in params)
        even, odd = philox_blocks(self.seed, self.call, first, count, out.device)
        self.law.produce(even, odd, target, params)
        if target is not out:
            out.copy_(target[:size])

    def finish(self) -> None:
        """Move the generator on to its next call."""
        self._finished()


def _cut(params: tuple[Any, ...], start: int, stop: int) -> tuple[Any, ...]:
    return tuple(p[start:stop] if isinstance(p, Tensor) and p.dim() else p for p in params)


def _padded(value: Tensor, size: int) -> Tensor:
    padded = value.new_zeros(size)
    padded[: len(value)] = value
    return padded


def _blocks_at_a_time(device: torch.device) -> int:
    if device.type != "cpu":
        return _GPU_BLOCKS
    threads = torch.get_num_threads()
    return _CPU_BLOCKS if threads == 1 else _PARALLEL_GRAIN * threads


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
