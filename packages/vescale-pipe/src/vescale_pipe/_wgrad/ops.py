"""The operators whose backward is split: what each of them does while a forward is recorded.

An operator runs with a weight that asks for no gradient, so autograd's own backward makes those of input and bias.
Where autograd would have chosen another kernel for a weight with a gradient, that one is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from . import formulas
from .autocast import any_autocast, cast_input, cast_weight, lower_dtype
from .kept import Kept, alias_of, keep

__all__ = ["SPLIT", "TRANSPOSES", "Handler", "other", "transpose"]

Handler = Callable[[Kept, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Returns the output, or NotImplemented where the operator is left to autograd."""

_REAL = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_PLAIN = (Tensor, Parameter)
_functorch = torch._C._functorch.peek_interpreter_stack
_view = torch.ops.aten._unsafe_view.default


def _fit(kept: Kept, x: Any, weight: Any) -> bool:
    """Return whether the gradient of a weight can wait."""
    return (
        type(weight) is Parameter
        and weight.requires_grad
        and id(weight) not in kept.native
        and type(x) in _PLAIN
        and _weight_of(kept, x)[0] is not weight
        and weight.dtype in _REAL
        and weight.layout is torch.strided
        and _functorch() is None
    )


def other(kept: Kept, value: Any, use: int = 0, slot: int = 0) -> Any:
    """Return what an operator may use without being split: a weight, or a stand-in for a recorded one.

    Args:
        kept: state of the micro-batch.
        value: an argument.
        use: number of the use, if it has one.
        slot: which argument it is.
    """
    if type(value) is Parameter:
        if id(value) in kept.recorded:
            return alias_of(kept, value, value, use or kept.count(), slot)
        kept.native.add(id(value))
    elif kept.views:
        found = kept.views.get(id(value))
        if found is not None:
            _, weight, turned = found
            if id(weight) in kept.recorded:
                return alias_of(kept, value, weight, use or kept.count(), slot, turned)
            kept.native.add(id(weight))
    return value


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any] | None:
    """Return all arguments in order, None for those not given; None if one is of another name."""
    found = list(args) + [None] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names:
            return None
        found[names.index(name)] = value
    return found


def _linear(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        named = _named(args, kwargs, ("input", "weight", "bias"))
        if named is None:
            return NotImplemented
        x, weight, bias = named
    else:
        x, weight, bias = args
    if not _fit(kept, x, weight):
        return NotImplemented
    if type(x) is Parameter:
        x = other(kept, x)
    folds = x.dim() < 3 or (bias is not None and x.is_contiguous()) or _folds(x)
    if any_autocast():
        pair = _autocast(kept, x, weight) if folds or bias is None else None
        if pair is None:
            return NotImplemented
        x, plain, shared = pair
    else:
        plain, shared = weight.detach(), 0
    if bias is not None:
        bias = other(kept, bias)
    if folds:
        y = func(x, plain, bias)
    else:
        y = _folded(x, plain.t())
        if bias is not None:
            y.add_(bias)
    return keep(kept, formulas.linear, (weight,), id(weight), None, x, y, shared)


def _folds(x: Tensor) -> bool:
    """Return whether all but the last dimension of a tensor are one, by its strides."""
    shape, stride = x.shape, x.stride()
    return all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(len(shape) - 2))


def _folded(x: Tensor, weight: Tensor) -> Tensor:
    """Return a product as autograd wants it: one product of matrices, at the price of a copy of the input."""
    y: Tensor = _view(torch.mm(x.reshape(-1, x.shape[-1]), weight), [*x.shape[:-1], weight.shape[1]])
    return y


def _autocast(kept: Kept, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Return input, weight and the weight's cast as autocast hands them on; None where that is left to it."""
    device = weight.device.type
    dtype = lower_dtype(device)
    if dtype is None:
        return x, weight.detach(), 0
    if device not in ("cpu", "cuda"):
        return None
    cast = cast_input(x, dtype)
    return None if cast is None else (cast, *cast_weight(kept, weight, dtype))


def _weight_of(kept: Kept, value: Any) -> tuple[Any, int]:
    """Return a weight and which of its transposes it is; 0 for itself."""
    if kept.views and type(value) is not Parameter:
        found = kept.views.get(id(value))
        if found is not None:
            return found[1], found[2]
    return value, 0


def _product(kept: Kept, func: Any, left: Any, right: Any, call: Any, alpha: Any, most: int) -> Any:
    """Split a product with a weight on either side.

    Args:
        kept: state of the micro-batch.
        func: the operator.
        left: factor.
        right: factor.
        call: calls the operator with two other factors.
        alpha: a factor of the product.
        most: dimensions that the input can have.
    """
    weight, turned = _weight_of(kept, right)
    on_right = _fit(kept, left, weight) and 2 <= left.dim() <= most
    x = left
    if not on_right:
        weight, turned = _weight_of(kept, left)
        x = right
        if not _fit(kept, x, weight) or x.dim() != weight.dim():
            return NotImplemented
    rank = weight.dim()
    transposed = turned > 0
    if rank == 3 and (x.dim() != 3 or x.shape[0] != weight.shape[0]):
        return NotImplemented
    if rank not in (2, 3):
        return NotImplemented
    x = other(kept, x)
    if id(weight) in kept.native:
        return NotImplemented
    seen = (right if on_right else left) if transposed else weight
    if any_autocast():
        pair = _autocast(kept, x, seen)
        if pair is None:
            return NotImplemented
        x, plain, shared = pair
    else:
        plain, shared = seen.detach(), 0
    extra: Any = (transposed, alpha) if rank == 2 else alpha
    if on_right:
        y = _folded(x, plain) if rank == 2 and x.dim() > 2 else call(x, plain)
        formula = formulas.mm_right if rank == 2 else formulas.batched_right
    else:
        y = call(plain, x)
        formula = formulas.mm_left if rank == 2 else formulas.batched_left
    return keep(kept, formula, (weight,), id(weight), extra, x, y, turned or shared)


def _matmul(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    return _product(kept, func, args[0], args[1], func, 1, 64)


def _rmatmul(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(kept, func, args[1], args[0], lambda left, right: func(right, left), 1, 64)


def _mm(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    return _product(kept, func, args[0], args[1], func, 1, 3)


def _addmm(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or "out" in kwargs:
        return NotImplemented
    twice = _weight_of(kept, args[0])[0]
    if twice is _weight_of(kept, args[1])[0] or twice is _weight_of(kept, args[2])[0]:
        return NotImplemented
    added = other(kept, args[0])

    def call(left: Tensor, right: Tensor) -> Any:
        return func(added, left, right, **kwargs)

    return _product(kept, func, args[1], args[2], call, kwargs.get("alpha", 1), 3)


def _conv(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(args, kwargs, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
    if named is None:
        return NotImplemented
    x, weight, bias, *rest = named
    if not _fit(kept, x, weight):
        return NotImplemented
    sizes = weight.shape[2:]
    stride, padding, dilation = _window(rest[0], 1, sizes), rest[1], _window(rest[2], 1, sizes)
    groups = 1 if rest[3] is None else rest[3]
    if isinstance(padding, str):
        total = [0 if padding == "valid" else step * (size - 1) for step, size in zip(dilation, sizes, strict=True)]
        if any(one % 2 for one in total):
            return NotImplemented
        padding = [one // 2 for one in total]
    padding = _window(padding, 0, sizes)
    x = other(kept, x)
    both = _fit(kept, x, bias) and bias is not weight
    plain_bias = bias.detach() if both else other(kept, bias)
    if any_autocast():
        pair = _autocast(kept, x, weight)
        if pair is None:
            return NotImplemented
        x, plain, shared = pair
        dtype = lower_dtype(weight.device.type)
        if both and dtype is not None:
            plain_bias, _ = cast_weight(kept, bias, dtype)
    else:
        plain, shared = weight.detach(), 0
    extra = (bias, stride, padding, dilation, groups)
    y = func(x, plain, plain_bias, stride, padding, dilation, groups)
    if both:
        kept.recorded.add(id(bias))
        return keep(kept, formulas.conv_both, (weight, bias), id(weight), extra, x, y, shared)
    return keep(kept, formulas.conv_weight, (weight,), id(weight), extra, x, y, shared)


def _window(value: Any, default: int, sizes: Sequence[int]) -> list[int]:
    if value is None:
        value = default
    if isinstance(value, int):
        return [value] * len(sizes)
    found = list(value)
    return found * len(sizes) if len(found) == 1 else found


def _embedding(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    named = _named(args, kwargs, names)
    if named is None:
        return NotImplemented
    x, weight, padding, max_norm, _, by_frequency, sparse = named
    if max_norm is not None or sparse or not _fit(kept, x, weight):
        return NotImplemented
    y = func(x, weight.detach(), padding, None, 2.0, bool(by_frequency), False)
    if padding is None:
        padding = -1
    elif padding < 0:
        padding += weight.shape[0]
    return keep(kept, formulas.embedding, (weight,), id(weight), (padding, bool(by_frequency)), x, y)


def transpose(kept: Kept, weight: Parameter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a transposed weight, known from now on as such.

    Args:
        kept: state of the micro-batch.
        weight: the weight.
        func: turns it.
        args: of `func`.
        kwargs: of `func`.
    """
    turned: Tensor = func(*args, **kwargs)
    if weight.dim() == 2 and turned.shape == weight.shape[::-1] and turned.stride() == weight.stride()[::-1]:
        kept.views[id(turned)] = (turned, weight, kept.count())
    return turned


SPLIT: dict[Any, Handler] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _mm,
    Tensor.bmm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _addmm,
    Tensor.baddbmm: _addmm,
}
"""By the function that a user calls."""

TRANSPOSES = frozenset(
    (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t, Tensor.transpose, torch.transpose)  # type: ignore[attr-defined]
)
"""What may turn a weight."""
