"""Handlers of the operators that each rank draws for itself: a closed form says where its elements stand in the stream.

Each returns what torch would return for the whole tensor: in-place ones their argument, the others a new DTensor with
the strides that the result has on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._cuda.laws import dropout_scale
from .._draw.mode import active_sampler
from ..errors import UnsupportedRandomOperatorError
from .operands import aligned, mixed
from .pass_on import pass_on
from .places import Place, dense_stride, place_of, wrap
from .ready import draw
from .whole import draw_whole

__all__ = [
    "Handler",
    "chances",
    "chances_in_place",
    "empty_like",
    "in_place",
    "into_out",
    "like",
    "native_dropout",
    "normal",
    "resize_to_itself",
]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def in_place(kernel: str) -> Handler:
    """`x.uniform_(...)`, with numbers as parameters."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not isinstance(tensor, DTensor):
            raise mixed(str(op))
        draw(kernel, tensor, args[1:], kwargs)
        return tensor

    return handler


def chances_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.bernoulli_(p)` with a tensor of chances."""
    tensor, chance = args
    if not isinstance(tensor, DTensor):
        raise mixed(str(op))
    draw("bernoulli_", tensor, (aligned(str(op), chance, tensor, place_of(tensor).part),), kwargs)
    return tensor


def chances(memory_format: torch.memory_format) -> Handler:
    """`torch.bernoulli(p)`, and its form with an input that only lends its shape."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, chance = args[0], args[-1]
        if not isinstance(source, DTensor):
            raise mixed(str(op))
        result = place_of(source).like(None, memory_format).empty(source._local_tensor.device)
        draw("bernoulli_", result, (aligned(str(op), chance, result, place_of(result).part),), kwargs)
        return result

    return handler


def like(kernel: str, memory_format: torch.memory_format | None = None) -> Handler:
    """`torch.rand_like(x)`, `torch.randint_like(x, high)` and the functional twins of in-place operators.

    Args:
        kernel: the in-place kernel.
        memory_format: of the result, where the call does not say.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, DTensor):
            raise mixed(str(op))
        given = tuple(_number(value) for value in args[1:])
        if kernel == "random_" and len(given) == 1 and "randint" in op._schema.name:
            given = (0, *given)
        place = place_of(source)
        if not kwargs:
            result = place.like(None, memory_format).empty(source._local_tensor.device)
            draw(kernel, result, given, kwargs)
            return result
        rest = dict(kwargs)
        generator = rest.pop("generator", None)
        rest.setdefault("memory_format", memory_format)
        result = _empty_like(op, place, source, rest)
        draw(kernel, result, given, {} if generator is None else {"generator": generator})
        return result

    return handler


def empty_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.empty_like(x)`: draws nothing, but dropout and others draw into it.

    torch's DTensor remembers the strides of the first such result and gives them to later ones of another memory
    format, and strides decide the order in which numbers are dealt.
    """
    source = args[0]
    plain = type(source._local_tensor) is Tensor and kwargs.get("layout") in (None, torch.strided)
    if not plain or any(placement.is_partial() for placement in source._spec.placements):
        return pass_on(op, args, kwargs)
    return _empty_like(op, place_of(source), source, kwargs)


def _empty_like(op: Any, place: Place, source: DTensor, options: dict[str, Any]) -> DTensor:
    if options.get("layout") not in (None, torch.strided):
        raise UnsupportedRandomOperatorError(
            f"{op}: layout = {options['layout']} is not defined for a DTensor; use torch.strided"
        )
    device = options.get("device")
    made = place.like(options.get("dtype"), options.get("memory_format"))
    return made.empty(
        source._local_tensor.device if device is None else torch.device(device),
        pin_memory=bool(options.get("pin_memory")),
    )


def _number(value: Any) -> Any:
    """The number in a tensor of one element (`randint_like` takes its bound so)."""
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def into_out(kernel: str, params: tuple[int, ...]) -> Handler:
    """`torch.rand(size, out=x)`: operators that torch itself runs as an in-place kernel on `out`.

    Args:
        kernel: the in-place kernel.
        params: indices of its parameters among the arguments; the size is the argument after all of them.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rest = dict(kwargs)
        out, generator = rest.pop("out"), rest.pop("generator", None)
        size = tuple(args[len(params)])
        if tuple(out.shape) != size:
            raise UnsupportedRandomOperatorError(
                f"{op}: out has shape {tuple(out.shape)}, but size is {size}, and a DTensor cannot be resized. Give an "
                "`out` of that shape"
            )
        given = tuple(args[i] for i in params)
        if kernel == "random_" and len(given) == 1:
            given = (0, *given)
        draw(kernel, out, given, {} if generator is None else {"generator": generator})
        return out

    return handler


def normal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.normal(mean, std)` where one of them, or both, is a tensor."""
    mean, std = (*args, 1.0)[:2]
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))  # type: ignore[no-untyped-call]
    sharded = [value for value in tensors if isinstance(value, DTensor)]
    model = next((value for value in sharded if value.shape == shape), None)
    meta = torch.empty(shape, dtype=tensors[0].dtype, device="meta")
    if model is not None:
        made = place_of(model).likes.get(("normal", meta.dtype))
        if made is None:
            made = place_of(model).likes["normal", meta.dtype] = place_of(model).like_meta(meta)
        result = made.empty(model._local_tensor.device)
    else:
        result = _replicated(sharded[0], meta)
    part = place_of(result).part
    draw("normal", result, tuple(aligned(str(op), value, result, part) for value in (mean, std)), kwargs)
    return result


def _replicated(source: DTensor, meta: Tensor) -> DTensor:
    mesh = source.device_mesh
    shape = tuple(meta.shape) if mesh.get_coordinate() is not None else (0,)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype))
    stride = dense_stride(shape, tuple(reversed(range(len(shape)))))
    device = source._local_tensor.device
    return wrap(torch.empty_strided(shape, stride, dtype=meta.dtype, device=device), spec)


def resize_to_itself(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.resize_(x.shape)`, with which torch begins `torch.randn(size, out=x)`; torch's DTensor has no `resize_`."""
    tensor, size = args
    if tuple(tensor.shape) == tuple(size) and kwargs.get("memory_format") is None:
        return tensor
    raise UnsupportedRandomOperatorError(
        f"{op}: a DTensor of shape {tuple(tensor.shape)} cannot be resized to {tuple(size)}. If it is the `out` of a "
        "random operator, give a DTensor that has the size already"
    )


def native_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout with its mask: the output is `x * mask / (1 - p)`, in the order in which torch's kernels round."""
    tensor, p, train = args
    if not isinstance(tensor, DTensor):
        raise mixed(str(op))
    if active_sampler() is not None:
        return draw_whole(op, args, kwargs)  # the sampler says how its device rounds the products
    place = place_of(tensor)
    out = place.like().empty(tensor._local_tensor.device)
    mask = place.like(torch.bool).empty(tensor._local_tensor.device)
    if train is False:
        out._local_tensor.copy_(tensor._local_tensor)
        mask._local_tensor.fill_(True)
        return out, mask
    on_cpu = tensor._local_tensor.device.type == "cpu"
    if p == 1 and not on_cpu:
        out._local_tensor.zero_()  # draws nothing on a GPU
        mask._local_tensor.zero_()
        return out, mask
    # The mask is drawn in the dtype of the input: on a GPU that decides how elements are dealt to threads.
    draw("dropout", out, (p,), kwargs)
    mask._local_tensor.copy_(out._local_tensor)
    if on_cpu:  # rounds the scaled mask to the dtype first
        out._local_tensor.mul_(0.0 if p == 1 else 1 / (1 - p)).mul_(tensor._local_tensor)
    else:
        out._local_tensor.mul_(tensor._local_tensor).mul_(dropout_scale(p, tensor.dtype))
    return out, mask
