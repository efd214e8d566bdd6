"""`local_parts`: random operators on plain tensors draw for a larger tensor, of which those are the local parts.

For programs that shard without a DTensor: data parallelism, or tensor parallelism with local outputs. A dispatch mode
sees each random operator, works out the shape and strides of the whole from the local tensor, and fills it by `fill`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ._blocks import Block
from ._cuda.composites import on_gpu
from ._cuda.generator import EmulatedGenerator
from ._draw.composite import is_composite, run_composite
from ._draw.forms import Form
from ._draw.interception import (
    InterceptRandom,
    base_name,
    bind_call,
    check_call,
    device_of,
    draws_nothing,
    refuse_layouts,
)
from ._draw.mode import active_sampler
from ._draw.prepared import fill_again
from ._draw.unseen import is_unseen, looking
from ._layout import Part, part_of_mesh
from ._layout.placements import cut_of
from ._portable import PortableGenerator
from .errors import LayoutError, UnsupportedRandomOperatorError

__all__ = ["local_parts"]


def local_parts(mesh: Any, placements: Sequence[Any], *, contiguous: bool = False) -> Block:
    """Take plain tensors for local parts, within a ``with`` block or in the calls of a decorated function.

    Random operators on plain tensors, of the thread that entered the block, draw what one device would draw for the
    whole tensor, and leave the generator as it would: dropout in every spelling, attention's on CPUs, `rand_like`,
    `torch.rand(local_shape)`, in-place ones. The size of the whole is the local size times the number of ranks along
    each sharded dim: there is no communication, so shards must be even, and all ranks must run the same operators with
    generators in step (see `check_agreement`). DTensors go their own way; the innermost of nested blocks counts.

    What depends on whole values or shapes is not for the block: `torch.nn.init` (use `init_`), and what goes on drawing
    until the numbers fit. Activation checkpointing draws again in the backward pass: run that within the block too, or
    decorate the function that is checkpointed.

    Args:
        mesh: a `DeviceMesh` that this process is in.
        placements: one per mesh axis: `Shard(dim)` of every tensor that is drawn, negative dims from its end, or
            `Replicate()`.
        contiguous: whether tensors of which each rank holds only one row are contiguous on one device. Their strides do
            not say so, and order decides who gets which numbers; without it such tensors are errors.

    Raises:
        LayoutError: for wrong placements; within the block for a tensor that has no such dim, or if its layout is not
            clear.
        UnsupportedRandomOperatorError: within the block, from an operator without a closed form (poisson, randperm,
            multinomial, fused attention with dropout, ...).

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> def forward(model, mesh, batch):
        ...     with local_parts(mesh, [Shard(0)]):  # each rank has its rows of the batch
        ...         return model(batch)
    """
    whole = _Whole(mesh, placements, contiguous)
    return Block("local_parts", functools.partial(_in_force, whole))


@contextlib.contextmanager
def _in_force(whole: _Whole) -> Iterator[None]:
    with looking(), LocalParts(whole):
        yield


class _Whole:
    """From local tensors to parts.

    Args:
        mesh: see `local_parts`.
        placements: see `local_parts`.
        contiguous: see `local_parts`.
    """

    def __init__(self, mesh: Any, placements: Sequence[Any], contiguous: bool) -> None:
        sizes = tuple(mesh.shape)
        given = tuple(placements) if isinstance(placements, Sequence) and not isinstance(placements, str) else None
        if given is None or len(given) != len(sizes):
            raise LayoutError(
                f"placements: a mesh of {len(sizes)} axes needs a list of {len(sizes)}, but got {placements!r}"
            )
        for axis, placement in enumerate(given):
            if hasattr(placement, "local_units"):
                raise LayoutError(f"placements[{axis}] = {placement!r}: shards must be even, not ragged")
            dim = getattr(placement, "dim", 0)
            if type(dim) is int:  # that it exists shows with the tensor; all else is checked here
                cut_of(placement, axis, max(dim + 1, -dim))
        part_of_mesh((), mesh, [_replicate()] * len(sizes))  # raises outside of the mesh
        self.mesh, self.sizes, self.placements, self.contiguous = mesh, sizes, given, contiguous
        self._parts: dict[tuple[Any, ...], Part] = {}

    def part(self, kernel: str, local: Tensor) -> Part:
        """Return the part that a local tensor is.

        Args:
            kernel: of the draw, for messages.
            local: the tensor.

        Raises:
            LayoutError: if the tensor has not got a sharded dim, or the order of its dims is not clear.
        """
        key = (tuple(local.shape), local.stride(), kernel == "bernoulli_")
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= 4096:
                self._parts.clear()
            found = self._parts[key] = self._part(kernel, *key[:2])
        return found

    def _part(self, kernel: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Part:
        counts = [1] * len(shape)
        for axis, placement in enumerate(self.placements):
            dim = getattr(placement, "dim", None)
            if dim is None:
                continue
            if not -len(shape) <= dim < len(shape):
                raise LayoutError(
                    f"{kernel} of a tensor of shape {shape} within local_parts: placements[{axis}] = {placement!r} "
                    "shards a dim that it has not got. Draw it outside of the block"
                )
            counts[dim] *= self.sizes[axis]
        self._refuse_unclear(kernel, shape, counts)
        whole = tuple(size * count for size, count in zip(shape, counts, strict=True))
        # From the fastest dim to the slowest; dims with more ranks behind them are farther apart in the whole.
        order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
        if any(size == 1 < count for size, count in zip(shape, counts, strict=True)):  # contiguous, or one dim
            order = list(reversed(range(len(shape))))
            if any(size != 1 and a != b for size, a, b in zip(shape, stride, _dense(shape), strict=True)):
                raise LayoutError(
                    f"{kernel} of a tensor of shape {shape} and strides {stride} within local_parts: contiguous=True "
                    "was given, but it is not contiguous, and with one row per rank its strides do not tell the order "
                    "of dims on one device. Give ranks at least two rows, or make it contiguous"
                )
            stride = _dense(shape)
        wide, factor = [0] * len(shape), 1
        for dim in order:
            wide[dim] = stride[dim] * factor
            factor *= counts[dim]
        return part_of_mesh(whole, self.mesh, self.placements, wide)

    def _refuse_unclear(self, kernel: str, shape: tuple[int, ...], counts: list[int]) -> None:
        single = [d for d, (size, count) in enumerate(zip(shape, counts, strict=True)) if size == 1 < count]
        if single and len(shape) > 2 and kernel == "bernoulli_" and min(single) >= 2 and set(shape[2:]) == {1}:
            raise LayoutError(
                f"{kernel} of a tensor of shape {shape} within local_parts: this looks like the mask of dropout1d, "
                f"dropout2d or dropout3d, which is the same along dim {single[0]} that the placements shard. Run that "
                "dropout in a block whose placements leave the dim out"
            )
        if single and not self.contiguous and any(size != 1 for size in shape):
            raise LayoutError(
                f"{kernel} of a tensor of shape {shape} within local_parts: each rank has one row of dim {single[0]}, "
                "so its strides do not tell in which order the dims stand in memory on one device. Give ranks at least "
                "two rows, or say local_parts(..., contiguous=True) if the tensors are contiguous there"
            )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


class LocalParts(InterceptRandom):
    """The mode of one use of a block; the forms of the operators are those of `InterceptRandom`.

    Args:
        whole: finds the part that a local tensor is.
    """

    sees_parts = True
    """Modes within this one leave draws to it."""

    def __init__(self, whole: _Whole) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # who draws is for `fill` to say
        self.whole = whole
        self._generator: torch.Generator | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one operator; those that draw nothing, and those on sharded or fake tensors, pass."""
        kwargs = kwargs or {}
        if is_unseen() or any(map(_goes_its_own_way, types)):
            return func(*args, **kwargs)  # this mode is off meanwhile, also for what the class calls itself
        if any(map(_has_its_own_dispatch, types)):
            return NotImplemented  # a wrapper, such as the result of a collective in flight: it calls on what is in it
        if is_composite(func):
            return self.composite(func, args, kwargs)
        name = base_name(func)
        if not name:
            return func(*args, **kwargs)
        bound = bind_call(func, args, kwargs)
        if draws_nothing(bound) or not self.wants(device_of(bound)):
            return func(*args, **kwargs)
        if torch.compiler.is_compiling() or get_proxy_mode() is not None:
            raise _unsupported(func, "while a graph is traced")
        refuse_layouts(name, bound)
        handler = self.handler(name)
        if handler is None or func._overloadname not in handler[0]:
            raise _unsupported(func, "since it has no closed form")
        before, self._generator = self._generator, bound.get("generator")
        try:
            return handler[1](bound)
        finally:
            self._generator = before

    def _fill(self, form: Form, out: Tensor) -> Tensor:
        if torch._debug_has_internal_overlap(out) == 1:
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
        if form.after is None and not out.is_complex() and not any(isinstance(a, Tensor) for a in form.args):
            check_call(form.kernel, out.dtype, form.args)
        self._fill_part(form, out)
        return out

    def _fill_part(self, form: Form, out: Tensor) -> None:
        part = self.whole.part(form.kernel, out)
        given = {} if self._generator is None else {"generator": self._generator}
        if form.after is not None:
            mean, std = form.after
            form = replace(form, kernel="normal", args=(mean, form.args[1] if std is None else std))
        args = tuple(a.expand(out.shape) if isinstance(a, Tensor) else a for a in form.args)
        fill_again(form.kernel, out, part, args, given)

    def _native_dropout(self, bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, p = bound["input"], bound["p"]
        sampler = active_sampler()
        if isinstance(sampler, PortableGenerator):
            return self._portable_dropout(x, p)
        if sampler is not None or x.device.type != "cpu":
            return super()._native_dropout(bound)
        mask = self.keep_mask(x, p)
        # The scaled mask is rounded to the dtype of the input first.
        return mask.mul(0.0 if p == 1 else 1 / (1 - p)).mul_(x), mask.to(torch.bool)

    def _portable_dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 1.0:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        mask = self.keep_mask(x, p)
        kept = mask.to(torch.bool)
        return x * mask.div_(1.0 - p), kept

    def composite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what an operator is made of, and see it: only inference mode shows such ones whole."""
        with self:
            instead = on_gpu(func, args, kwargs) if isinstance(active_sampler(), EmulatedGenerator) else None
            return run_composite(func, args, kwargs) if instead is None else instead()

    def keep_mask(self, x: Tensor, p: float) -> Tensor:
        """Ones and zeros of `native_dropout`; its dtype decides on a GPU how elements are dealt to threads."""
        mask = torch.empty_like(x)
        fill_again("dropout", mask, self.whole.part("dropout", mask), (p,), {})
        return mask


def _unsupported(func: Any, why: str) -> UnsupportedRandomOperatorError:
    return UnsupportedRandomOperatorError(
        f"{func} within local_parts: it cannot be drawn part by part {why}; nothing was drawn. Call it outside of the "
        "block, where it draws the same on every rank whose generators are in step"
    )


@functools.cache
def _goes_its_own_way(kind: type) -> bool:
    """Whether tensors of a class know of which whole they are parts, or have no numbers."""
    if issubclass(kind, FakeTensor):
        return True
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)


@functools.cache
def _has_its_own_dispatch(kind: type) -> bool:
    own: Any = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__
