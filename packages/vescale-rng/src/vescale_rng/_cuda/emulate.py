"""`emulate_cuda`: a block in which the random operators on CPU tensors give what a GPU would draw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .._draw.borrowed import block
from .._draw.interception import InterceptRandom
from .._draw.mode import use_sampler
from ..errors import UnsupportedRandomOperatorError
from .composites import on_gpu, registered
from .generator import EmulatedGenerator
from .laws import vector_size
from .profile import DeviceProfile

__all__ = ["EmulatedGenerator", "emulate_cuda"]


class EmulateRandom(InterceptRandom):
    """Random operators on plain CPU tensors, as a GPU runs them."""

    def wants(self, device: torch.device) -> bool:
        """Only CPU tensors stand for those of the emulated GPU."""
        return device.type == "cpu"

    def explicit_generator(self, name: str) -> None:
        """Refuse: a GPU tensor takes no CPU generator, so the numbers would be those of no GPU."""
        raise UnsupportedRandomOperatorError(
            f"{name}: generator= is a torch.Generator of the CPU, which no GPU tensor accepts; within emulate_cuda "
            "leave it out, or give the emulated generator to the functions of vescale_rng"
        )

    def order(self, kernel: str, out: Tensor, args: tuple[Any, ...]) -> Sequence[int]:
        """Memory order, except for bernoulli with a tensor of chances, which looks at the strides of both."""
        if kernel == "bernoulli_" and args and isinstance(args[0], Tensor):
            return _apply_order(out, args[0])
        return super().order(kernel, out, args)

    def keep_mask(self, x: Tensor, p: float) -> Tensor:
        """The mask of fused dropout, which depends on the alignment and strides of its input."""
        address = int(x.storage_offset()) * x.element_size()
        vector = vector_size(x.dtype, x.shape, x.stride(), address) if x.is_floating_point() else 1
        mask = torch.empty_like(x)
        # One element at a time means the kernel for any strides, which goes in logical order.
        dims = range(x.dim()) if vector == 1 else self.order("dropout", mask, ())
        self.draw("dropout", mask, (p, vector), tuple(dims), ((x.numel(),), (1,)))
        return mask

    def composite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In inference mode operators arrive whole: run what a GPU runs instead."""
        with self:
            instead = on_gpu(func, args, kwargs)
            return func.decompose(*args, **kwargs) if instead is None else instead()


def _apply_order(out: Tensor, p: Tensor) -> list[int]:
    """Order of the elements in CUDA_tensor_apply2: dims are swapped where the strides of both tensors agree to it."""
    kind = torch.float64 if out.dtype == torch.float64 else torch.float32
    read = p if p.dtype == kind else torch.empty_like(p, dtype=kind)
    read = read.expand(out.shape)
    order = list(range(out.dim()))
    for i in range(len(order) - 1):
        for j in range(i + 1, len(order)):
            if out.shape[order[i]] == 1:
                break
            if out.shape[order[j]] == 1:
                continue
            steps = [(t.stride(order[i]), t.stride(order[j])) for t in (out, read)]
            if any(a < b for a, b in steps) and not any(a > b for a, b in steps):
                order[i], order[j] = order[j], order[i]
    return order


def _profile(given: DeviceProfile | str) -> DeviceProfile:
    if isinstance(given, str):
        return DeviceProfile.of(given)
    if not isinstance(given, DeviceProfile):
        raise TypeError(
            f"profile: expected the name of a GPU model, a DeviceProfile or an EmulatedGenerator, got {given!r}"
        )
    return given


def _emulating() -> bool:
    return any(isinstance(mode, EmulateRandom) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def emulate_cuda(profile: DeviceProfile | str | EmulatedGenerator, *, seed: int = 0) -> Iterator[EmulatedGenerator]:
    """Draw on the CPU what a GPU would draw, on plain tensors and on sharded ones.

    Integers, uniform numbers, bernoulli and dropout masks are bitwise those of the GPU. Normal, log-normal,
    exponential, cauchy and geometric numbers stand at the right places of the right stream, but a GPU computes their
    float32 and half values with approximate instructions, so last bits can differ. `dropout` runs as a GPU's fused one.

    Within the block the state is kept in torch's default CPU generator, so `torch.manual_seed`, `fork_rng` and
    activation checkpointing act on the emulated GPU; that generator goes back to where it was at the end. Keep a
    checkpointed forward and its backward in one block: else `checkpoint(use_reentrant=False)` raises a
    `CheckpointError`, and with `use_reentrant=True`, or where a state from within the block is loaded outside by hand,
    nothing can tell, and the masks are wrong. States of torch's own that are loaded within the block are errors.

    Random operators without a model (poisson, randperm, multinomial, rrelu, fused attention with dropout, ...) raise,
    and so do nested and sparse tensors, and a `torch.Generator` given explicitly other than the default one. CPU
    tensors alone are emulated, on the thread that entered the block; sharded draws of this package on every thread.
    Blocks of one thread may be nested; no other thread can enter one until it ends. What draws on the CPU of a GPU
    machine too, such as a data loader's seed, belongs outside of the block.

    A GPU runs `bernoulli_(p)` with a tensor `p` in an order that depends on the strides of both. Plain tensors follow
    it in all cases; sharded draws take it that `p` is laid out in memory like the whole tensor that is filled.

    Args:
        profile: a GPU model ("H100", "A100", ...; see `DeviceProfile.of`), its profile, or an emulated generator to go
            on with.
        seed: as of `torch.manual_seed`; not with a generator.

    Yields:
        The generator of the emulated GPU; it keeps its last state after the block.

    Raises:
        RandomError: for an unknown GPU model, a seed out of range, or if another thread is within a block.
        TypeError: if `profile` is none of these, or `seed` no integer.
        UnsupportedRandomOperatorError: within the block, from an operator that is not modelled.

    >>> with emulate_cuda("A100", seed=0) as generator:
    ...     print(torch.rand(4), generator.get_offset())
    tensor([0.3990, 0.5167, 0.0249, 0.9401]) 4
    """
    if isinstance(profile, EmulatedGenerator):
        if seed:
            raise ValueError(f"seed={seed} goes with a GPU model; call generator.manual_seed instead")
        generator = profile
    else:
        generator = EmulatedGenerator(_profile(profile), seed)
    with block(generator._state), registered(_emulating), use_sampler(generator), EmulateRandom(generator):
        yield generator
