"""`fill`: draw the local elements of a random operator on a whole tensor, and leave the generator as one device would.

The one entrance for all hosts: vescale_dtensor by hook, torch's DTensor by handlers, plain tensors by functions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor

from .._layout import Box, Part
from ..errors import LayoutError, RandomError, UnsupportedRandomOperatorError
from .cpu import cpu_source
from .cpu_sources import run_kernel
from .forms import CLOSED_FORM, Form, check_std, off_cpu, real_args, resolve, scale_normal
from .keep import keep
from .source import Sampler, Source
from .unseen import unseen
from .walk import walk
from .who import default_generator, who_draws
from .whole import WHOLE

__all__ = ["default_generator", "fill", "scope"]


def scope(op: str) -> Literal["local", "global"]:
    """Tell whether an operator can be drawn part by part ("local") or only for the whole tensor ("global").

    Args:
        op: aten base name; "dropout" is the keep mask.

    Raises:
        UnsupportedRandomOperatorError: if it cannot be drawn at all.

    >>> scope("normal_"), scope("poisson")
    ('local', 'global')
    """
    if op in CLOSED_FORM:
        return "local"
    if op in WHOLE:
        return "global"
    raise UnsupportedRandomOperatorError(
        f"{op}: vescale_rng does not know how one device draws it, so it draws nothing. Draw it on a plain tensor, the "
        f"same on every rank, and shard that. Known: {', '.join(sorted(CLOSED_FORM | WHOLE.keys()))}"
    )


@unseen
def fill(
    op: str, local: Tensor, part: Part, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Fill a local tensor with its elements of a draw for the whole tensor.

    Args:
        op: aten base name of what one device would run: "rand", "randn_like", "uniform_", "bernoulli_", ...;
            "dropout" asks for the keep mask of ones and zeros, `args == (p,)`.
        local: overwritten; its dtype and device are those of the draw. On the meta device, and into fake
            tensors, nothing is drawn.
        part: which elements of the whole tensor it holds.
        args: parameters of the distribution; tensors among them are local parts of the same shape.
        kwargs: named ones, and `generator`: a `torch.Generator`, or what `portable` or `emulate_cuda` gave.

    Raises:
        UnsupportedRandomOperatorError: if the operator has no form that can be drawn part by part.
        LayoutError: if `local`, or a tensor among the parameters, has not the shape of the part.
        TypeError: if the generator is none.
        RandomError: if the generator lies on another device, or a tensor of standard deviations has negative ones.
    """
    form = resolve(op, args, kwargs)
    if local.device.type == "meta" or isinstance(local, FakeTensor):
        return
    if local.requires_grad:
        local = local.detach()
    form = _with_local_tensors(form, local, part)
    if local.shape != part.local_shape:
        local = _of_local_shape(local, part)
    if form.after is None:
        _fill(form, local, part)
        return
    check_std(form.after[1])
    go_back = keep(local.device, form.generator)
    try:
        _fill(form, local, part)
        scale_normal(local, *form.after)
    except BaseException:
        go_back()
        raise


def _fill(form: Form, local: Tensor, part: Part) -> None:
    if is_batchedtensor(local):
        _fill_batched(form, local, part)
    elif local.is_conj() or local.is_neg():  # what is written has its bits as they are, and what is read has not
        plain = torch.empty_like(local.resolve_conj().resolve_neg())
        _fill(form, plain, part)
        local.copy_(plain)
    elif not local.is_complex():
        _fill_real(form, local, part)
    elif form.kernel not in ("uniform_", "normal_"):
        raise UnsupportedRandomOperatorError(f"{form.kernel} is not defined for {local.dtype}")
    elif part.windows is None and not local.is_contiguous():  # its real view would have two dims, and no boxes in it
        dense = torch.empty_like(local, memory_format=torch.contiguous_format)
        _fill(form, dense, part)
        local.copy_(dense)
    else:
        _fill_real(real_args(form), torch.view_as_real(local), _real_part(part))


def _fill_batched(form: Form, local: Tensor, part: Part) -> None:
    """Within `torch.vmap`, where torch draws for all of the batch at once: it can do that for whole tensors alone."""
    by_torch = form.after is None and isinstance(who_draws(form.generator), torch.Generator | None)
    if not (by_torch and part.is_whole and local.stride() == part.global_stride):
        raise UnsupportedRandomOperatorError(
            f"{form.kernel} on a part of a tensor within torch.vmap: one device draws for the whole batch at once, in "
            "an order that parts do not have. Draw outside of the vmap, for a tensor with the batch as a dim, and hand "
            "it in as an argument"
        )
    run_kernel(form.kernel, local, form.args, form.generator)


def _with_local_tensors(form: Form, local: Tensor, part: Part) -> Form:
    """Check the parameters that are tensors, before anything is drawn: local parts, or single numbers."""
    if not any(isinstance(a, Tensor) for a in (*form.args, *(form.after or ()))):
        return form
    chances = form.kernel == "bernoulli_"
    args = tuple(_parameter("p" if chances else form.kernel, a, local, part, chances) for a in form.args)
    after = form.after and tuple(
        _parameter(name, a, local, part, True) for name, a in zip(("mean", "std"), form.after, strict=True)
    )
    return replace(form, args=args, after=after)


def _parameter(name: str, value: Any, local: Tensor, part: Part, elementwise: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not elementwise:
        if value.numel() == 1:
            return value.item()
        raise TypeError(f"{name}: takes numbers as its arguments, but got a tensor of shape {tuple(value.shape)}")
    if value.device != local.device:
        raise RandomError(f"{name}: lies on {value.device}, but the tensor to fill on {local.device}")
    if value.shape == part.local_shape:
        return value
    if value.shape == local.shape or part.fits(value):
        return value.reshape(part.local_shape)
    if value.dim() == 0:
        return value.expand(part.local_shape)
    raise LayoutError(
        f"{name}: expected a tensor of the shape of the local part, {tuple(local.shape)}, or a single number, but got "
        f"one of shape {tuple(value.shape)}. Give the elements that belong to this rank's part"
    )


def _of_local_shape(local: Tensor, part: Part) -> Tensor:
    """View a dense local tensor of another shape, as ragged parts allow it, in the shape of the part."""
    part.views(local)  # raises where the part does not allow it
    return local.view(part.local_shape)


def _fill_real(form: Form, local: Tensor, part: Part) -> None:
    who = who_draws(form.generator)
    if who is None:
        who = form.generator or default_generator(local.device)
    if not isinstance(who, torch.Generator):
        _fill_from(who, form, local, part)
        return
    if who.device.type != local.device.type:
        raise RandomError(
            f"generator lies on {who.device}, but the tensor to fill on {local.device}; give a generator of "
            "the device of the tensor, or none for the default one"
        )
    if local.device.type == "cpu":
        _fill_cpu(form, local, part, who)
    else:
        _fill_cuda(form, local, part, who)


def _fill_cpu(form: Form, local: Tensor, part: Part, generator: torch.Generator) -> None:
    if part.is_whole and local.stride() == part.global_stride:
        run_kernel(form.kernel, local, form.args, generator)
        return
    before = generator.get_state()
    try:
        source = cpu_source(form.kernel, local.dtype, part.global_shape, part.global_stride, form.args, generator)
        if source is None:
            _fill_whole(form, local, part, generator)
        else:
            _produce(source, part, local, form.args)
    except BaseException:
        generator.set_state(before)
        raise


def _produce(source: Source, part: Part, local: Tensor, args: tuple[Any, ...]) -> None:
    walk(source, part, local, args)
    source.finish()


def source_of(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    args: tuple[Any, ...],
    stride: Sequence[int] | None,
    generator: torch.Generator,
) -> Any:
    """Return the source of a draw from a generator, for those who only count or move."""
    form = resolve(op, args, {})
    part = Part.whole(shape, stride)
    if dtype.is_complex:
        form, part, dtype = real_args(form), _real_part(part), dtype.to_real()
    if generator.device.type != "cpu":
        from .._cuda.sources import cuda_source

        kernel, given = off_cpu(form)
        return cuda_source(kernel, dtype, generator.device, part.global_shape, part.global_stride, given, generator)
    source = cpu_source(form.kernel, dtype, part.global_shape, part.global_stride, form.args, generator)
    if source is None:
        raise UnsupportedRandomOperatorError(f"{op} of {dtype}: this torch takes numbers in a way that is not known")
    return source


def _fill_cuda(form: Form, local: Tensor, part: Part, generator: torch.Generator) -> None:
    from .._cuda.sources import cuda_source

    before = generator.get_offset()
    try:
        kernel, args = off_cpu(form)
        source: Source = cuda_source(
            kernel, local.dtype, local.device, part.global_shape, part.global_stride, args, generator
        )
        _produce(source, part, local, args)
    except BaseException:
        generator.set_offset(before)
        raise


def _fill_from(sampler: Sampler, form: Form, local: Tensor, part: Part) -> None:
    before = sampler.save()
    try:
        kernel, args = off_cpu(form)
        source = sampler.source(kernel, local.dtype, local.device, part.global_shape, part.global_stride, args)
        _produce(source, part, local, args)
    except BaseException:
        sampler.restore(before)
        raise


def _fill_whole(form: Form, local: Tensor, part: Part, generator: torch.Generator) -> None:
    """Run the kernel on the whole tensor and keep our elements; others' parameters are zeros, which draw as much."""
    whole = torch.empty_strided(part.global_shape, part.global_stride, dtype=local.dtype, device=local.device)
    args = tuple(_among_zeros(a, part) if isinstance(a, Tensor) else a for a in form.args)
    run_kernel(form.kernel, whole, args, generator)
    take(whole, local, part)


def _among_zeros(value: Tensor, part: Part) -> Tensor:
    whole = value.new_zeros(part.global_shape)
    put(value, whole, part)
    return whole


def _window(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]


def take(whole: Tensor, local: Tensor, part: Part) -> None:
    """Copy a part of a whole tensor into the local one."""
    for view, box in zip(part.views(local), part.boxes, strict=True):
        view.copy_(_window(whole, box))


def put(local: Tensor, whole: Tensor, part: Part) -> None:
    """Copy the local tensor to its place in the whole one."""
    for view, box in zip(part.views(local), part.boxes, strict=True):
        _window(whole, box).copy_(view)


@functools.lru_cache(maxsize=1024)
def _real_part(part: Part) -> Part:
    """The part of the real view of a complex tensor: one more dim, of size 2."""
    return Part(
        (*part.global_shape, 2),
        (*(2 * s for s in part.global_stride), 1),
        (*part.local_shape, 2),
        tuple(Box((*box.offset, 0), (*box.shape, 2)) for box in part.boxes),
        None if part.windows is None else tuple((*window, (0, 2)) for window in part.windows),
    )
