"""Sources of CUDA draws: computed for an emulated GPU, or drawn by torch's own kernels on a real one.

With more elements than threads, a launch works in rounds: round k is what an ordinary draw of a round's elements gives
with the generator's offset moved by k calls. So torch's kernel produces any range from the beginning of its first round
on, and neither the transforms nor the approximate instructions of the device have to be known.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import RandomError
from .kernels import emulate, emulate_at
from .laws import Law, law_of, logical_order, logical_positions, pieces
from .profile import DeviceProfile

__all__ = ["EmulatedKernel", "EmulatedSource", "Kernel", "Offset", "RoundSource", "cuda_source"]

# Computing one element costs about 40 ns on a CPU, beginning a range 100 us.
_EMULATED_SEEK = 2500.0
# A launch costs about as much as 2 million elements on a recent GPU.
_LAUNCH = 2e6


class Offset(Protocol):
    """The part of a CUDA generator that a draw changes."""

    def get_offset(self) -> int:
        """Return the offset, words."""

    def set_offset(self, offset: int) -> object:
        """Set the offset, a multiple of 4."""


class Kernel(Protocol):
    """Runs a whole, ordinary draw."""

    def __call__(self, op: str, out: Tensor, params: tuple[Any, ...], seed: int, offset: int) -> None:
        """Fill a tensor.

        Args:
            op: kernel name, or "dropout" with `params` `(p, vector)` for a keep mask.
            out: contiguous 1-D tensor to fill.
            params: parameters of the distribution.
            seed: of the generator.
            offset: of the generator, a multiple of 4.
        """


class _Launches:
    """Common part: the launches that a draw consists of, and the generator that it advances."""

    def __init__(
        self,
        law: Law,
        shape: Sequence[int],
        stride: Sequence[int],
        seed: int,
        generator: Offset,
        profile: DeviceProfile,
    ) -> None:
        self.law, self.seed, self.profile = law, seed, profile
        self.shape, self.stride = tuple(shape), tuple(stride)
        self._generator = generator
        self._base = generator.get_offset()
        self._launches, self._total = pieces(law, shape, stride, profile)
        self.numel = sum(count for _, count, _ in self._launches)

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        """Produce the elements `[start, start + len(out))`."""
        stop = start + out.numel()
        for first, count, offset in self._launches:
            a, b = max(start, first), min(stop, first + count)
            if a < b:
                some = tuple(p[a - start : b - start] if isinstance(p, Tensor) else p for p in params)
                self._emit(out[a - start : b - start], a - first, some, count, self._base + offset)

    def _emit(self, out: Tensor, start: int, params: tuple[Any, ...], numel: int, offset: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Advance the generator by what the whole draw takes."""
        self._generator.set_offset(self._base + self._total)


class EmulatedSource(_Launches):
    """A draw computed as a given GPU would; any range costs only itself.

    Args:
        law: of the draw.
        shape: of the whole tensor.
        stride: of the whole tensor, elements.
        seed: of the generator.
        generator: whose offset is read now and advanced at the end.
        profile: of the GPU.
    """

    grain = 1
    seek_cost = _EMULATED_SEEK
    skip_cost = 0.0

    def _emit(self, out: Tensor, start: int, params: tuple[Any, ...], numel: int, offset: int) -> None:
        if type(out) is Tensor and torch._C._len_torch_dispatch_stack():
            # `emulate_cuda` itself is a dispatch mode, and others may fake what they see.
            with torch._C._DisableTorchDispatch():
                self._compute(out, start, params, numel, offset)
        else:
            self._compute(out, start, params, numel, offset)

    def _compute(self, out: Tensor, start: int, params: tuple[Any, ...], numel: int, offset: int) -> None:
        launch: dict[str, Any] = {"numel": numel, "seed": self.seed, "offset": offset, "profile": self.profile}
        if logical_order(self.law, self.shape, self.stride):
            positions = logical_positions(start, start + out.numel(), self.shape, self.stride)
            emulate_at(self.law, out, positions.to(out.device), params, **launch)
        else:
            emulate(self.law, out, start, params, **launch)


class EmulatedKernel:
    """An emulated GPU's kernels in place of those of a real one, so that rounds can be put together without a GPU."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile

    def __call__(self, op: str, out: Tensor, params: tuple[Any, ...], seed: int, offset: int) -> None:
        """Compute a whole draw."""
        numel = out.numel()
        law = law_of(op, out.dtype, (numel,), (1,), params)
        emulate(law, out, 0, params, numel=numel, seed=seed, offset=offset, profile=self.profile)


class RoundSource(_Launches):
    """A draw produced round by round with ordinary draws of the GPU itself.

    Args:
        law: of the draw, of the layouts "grid" or "vector", not in logical order.
        shape: of the whole tensor.
        stride: of the whole tensor, elements.
        seed: of the generator.
        generator: whose offset is read now and advanced at the end.
        profile: of the GPU.
        kernel: runs the ordinary draws, without touching `generator`.
    """

    seek_cost = _LAUNCH
    skip_cost = 0.0

    def __init__(
        self,
        law: Law,
        shape: Sequence[int],
        stride: Sequence[int],
        seed: int,
        generator: Offset,
        profile: DeviceProfile,
        kernel: Kernel,
    ) -> None:
        super().__init__(law, shape, stride, seed, generator, profile)
        if not _has_rounds(law, shape, stride):
            raise RandomError(
                f"{law.kernel}: layout {law.layout!r} with strides {tuple(stride)} has no rounds in memory order; "
                "use EmulatedSource, which is exact for it"
            )
        self._kernel = kernel
        full = law.round_numel(profile.max_threads)
        # No more elements than threads: a launch of other size, all of it in one round.
        self.grain = max(1, min(full, self.numel))

    def _emit(self, out: Tensor, start: int, params: tuple[Any, ...], numel: int, offset: int) -> None:
        law = self.law
        if law.kernel == "dropout":
            params = (params[0], law.unroll if law.layout == "vector" else 1)
        full = law.round_numel(self.profile.max_threads)
        step, skipped = divmod(start, full)
        if skipped:  # begins inside a round: draw that one from its beginning
            end = min(skipped + out.numel(), full)
            if law.layout == "vector":
                end = min(-(-end // law.unroll) * law.unroll, full)
            scratch = out.new_empty(end)
            self._kernel(law.kernel, scratch, params, self.seed, offset + step * law.round_offset())
            here = min(out.numel(), full - skipped)
            out[:here].copy_(scratch[skipped : skipped + here])
            out, step = out[here:], step + 1
            if out.numel() == 0:
                return
        whole = out.numel() if law.layout == "grid" else out.numel() // law.unroll * law.unroll
        if whole != out.numel():  # the vector size of the ordinary draw has to be that of the whole one
            scratch = out.new_empty(whole + law.unroll)
            self._kernel(law.kernel, scratch, params, self.seed, offset + step * law.round_offset())
            out.copy_(scratch[: out.numel()])
            return
        # A draw of several rounds, and of a part of a last one, is an ordinary draw: with no more elements than threads
        # each is the first of its thread, and with more the grid is full.
        self._kernel(law.kernel, out, params, self.seed, offset + step * law.round_offset())


def _has_rounds(law: Law, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether ranges in memory order are ranges of ordinary draws: not for chances, nor for some permuted dropouts."""
    return law.layout != "apply" and not logical_order(law, shape, stride)


# ------------------------------------------------------------------ real GPUs


class _TorchKernel:
    """torch's own CUDA kernels on a private generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)

    def __call__(self, op: str, out: Tensor, params: tuple[Any, ...], seed: int, offset: int) -> None:
        """Run a whole draw."""
        generator = self._generator
        generator.manual_seed(seed if seed < 1 << 63 else seed - (1 << 64))
        generator.set_offset(offset)
        if op == "dropout":
            p, vector = params
            x = _dropout_input(out.numel(), out.dtype, self._device, vector)
            # native_dropout without a generator argument is this operator, with the chance to keep.
            mask = torch.ops.aten._fused_dropout.default(x, 1.0 - p, generator)[1]
            out.copy_(mask)
        else:
            getattr(out, op)(*params, generator=generator)


def _dropout_input(numel: int, dtype: torch.dtype, device: torch.device, vector: int) -> Tensor:
    """A tensor for which fused dropout chooses a vector size, by the alignment of its address or by gaps in memory."""
    if vector == 1:
        return torch.ones(1, dtype=dtype, device=device).expand(numel)
    best = 16 // dtype.itemsize
    shift = 0 if vector == best else vector
    return torch.empty(numel + shift, dtype=dtype, device=device)[shift:]


class _PerThread(threading.local):
    """Private generators: threads may draw at the same time."""

    def __init__(self) -> None:
        self.kernels: dict[torch.device, _TorchKernel] = {}


_per_thread = _PerThread()


def _torch_kernel(device: torch.device) -> _TorchKernel:
    made = _per_thread.kernels
    if device not in made:
        made[device] = _TorchKernel(device)
    return made[device]


def cuda_source(
    op: str,
    dtype: torch.dtype,
    device: torch.device,
    shape: Sequence[int],
    stride: Sequence[int],
    args: tuple[Any, ...],
    generator: torch.Generator | None = None,
) -> EmulatedSource | RoundSource:
    """Begin a draw on a real CUDA device.

    Args:
        op: kernel name ("uniform_", "normal_", ..., "dropout" for a keep mask).
        dtype: of the result; for "dropout" of the operator's input.
        device: a CUDA device.
        shape: of the whole tensor.
        stride: of the whole tensor, elements; for "dropout" of the operator's input.
        args: parameters of the distribution.
        generator: of that device; None is its default one. Its offset is advanced when the source is finished.

    Returns:
        A source whose `emit` takes any range, and is cheapest for ranges that begin at multiples of `grain`.

    Raises:
        UnsupportedRandomOperatorError: for an operator, dtype or layout without a model.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    own = torch.cuda.default_generators[index] if generator is None else generator
    if own.device.type != "cuda":
        raise RuntimeError(f"generator is on {own.device}, but the tensor is on {device}; pass a CUDA generator")
    profile = DeviceProfile.current(device)
    law = law_of(op, dtype, shape, stride, args)
    if not _has_rounds(law, shape, stride):
        # Its words cannot be reached from outside the kernel in memory order, but its arithmetic is exact anywhere.
        source = EmulatedSource(law, shape, stride, own.initial_seed(), own, profile)
        source.seek_cost = _LAUNCH
        return source
    return RoundSource(law, shape, stride, own.initial_seed(), own, profile, _torch_kernel(device))
