"""`portable`: a block in which every random operator draws from the portable stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._draw.borrowed import block
from .._draw.interception import InterceptRandom
from .._draw.mode import use_sampler
from .generator import PortableGenerator

__all__ = ["portable"]


class _InterceptPortable(InterceptRandom):
    """Plain tensors' operators, in the portable forms."""

    sampler: PortableGenerator
    way_out = "Call it outside of the block or, if it takes one, with a torch.Generator of its own"

    def draw(
        self,
        kernel: str,
        out: Tensor,
        args: tuple[Any, ...],
        order: Sequence[int] | None = None,
        layout: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Fill a tensor; an empty one is a call like any other."""
        if out.numel() == 0:
            self.sampler.source(kernel, out.dtype, out.device, tuple(out.shape), out.stride(), args).finish()
            return
        super().draw(kernel, out, args, order, layout)

    def handler(self, name: str) -> tuple[frozenset[str], Callable[[dict[str, Any]], Any]] | None:
        """Add the operators whose result is made as a whole."""
        if name == "randperm":
            return frozenset({"default", "generator", "out", "generator_out"}), self._randperm
        if name == "multinomial":
            return frozenset({"default", "out"}), self._multinomial
        return super().handler(name)

    def _randperm(self, bound: dict[str, Any]) -> Tensor:
        out = bound.get("out")
        device = out.device if out is not None else bound["device"] or torch.get_default_device()
        dtype = out.dtype if out is not None else bound["dtype"]
        if not isinstance(dtype, torch.dtype):  # the schema's default is a number
            dtype = torch.int64
        return _into(out, self.sampler.whole("randperm", (bound["n"],), {"dtype": dtype, "device": device}))

    def _multinomial(self, bound: dict[str, Any]) -> Tensor:
        args = (bound["self"], bound["num_samples"], bound["replacement"])
        return _into(bound.get("out"), self.sampler.whole("multinomial", args, {}))

    def _native_dropout(self, bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """By the operations that `dropout` runs on a CPU: the fused kernel of GPUs rounds 16-bit types elsewhere."""
        x, p = bound["input"], bound["p"]
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 1.0:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        mask = self.keep_mask(x, p)
        kept = mask.to(torch.bool)
        return x * mask.div_(1.0 - p), kept


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.resize_(result.shape).copy_(result)


@contextlib.contextmanager
def portable(seed: int | PortableGenerator, *, counter: int = 0) -> Iterator[PortableGenerator]:
    """Draw the same numbers on every device and machine, for every world size and sharding.

    Within the block (or the decorated function), random operators on plain tensors and on sharded ones draw from a
    `PortableGenerator`. The numbers are not those of `torch.manual_seed(seed)` on any device. The block keeps the
    stream's state in torch's default CPU generator, so `torch.get_rng_state`, `fork_rng` and activation checkpointing
    mean what they always do, and `torch.manual_seed(s)` starts the stream of seed s. At the end that generator goes
    back to where it was before the block. A call with a `torch.Generator` of its own draws from that, as ever; to give
    the default one is to give none.

    Keep a checkpointed forward and its backward in one block: the backward draws again, and outside of the block torch
    would draw. `checkpoint(use_reentrant=False)` then raises a `CheckpointError` about the tensors that were saved;
    with `use_reentrant=True`, or where a state from within the block is loaded by hand, nothing can tell, and the masks
    are wrong. States of torch's own that are loaded within the block are errors.

    Operators without a portable form (poisson, binomial, ...) and nested or sparse tensors raise an error that names
    them. Blocks of one thread may be nested, also in those of `emulate_cuda`; the innermost draws. A block holds on the
    thread that entered it and on those of autograd; numbers that another thread drew meanwhile are reported by a
    warning, and no other thread can enter a block until it ends.

    Args:
        seed: an integer of 64 bits; or a generator, to go on with its stream.
        counter: number of the first operator call; only with an integer seed.

    Yields:
        The generator; it keeps its last state after the block.

    Raises:
        RandomError: if `seed` or `counter` is out of range, or another thread is within a block.
        TypeError: if one of them is no integer.
        UnsupportedRandomOperatorError: within the block, from an operator without a portable form.

    >>> with portable(0) as generator:
    ...     print(torch.rand(3), generator.counter)
    tensor([0.3990, 0.8805, 0.7357]) 1
    """
    if isinstance(seed, PortableGenerator):
        if counter:
            raise ValueError(f"counter={counter} goes with an integer seed; set generator.counter instead")
        generator = seed
    else:
        generator = PortableGenerator(seed, counter=counter)
    with block(generator._state), use_sampler(generator), _InterceptPortable(generator):
        yield generator
