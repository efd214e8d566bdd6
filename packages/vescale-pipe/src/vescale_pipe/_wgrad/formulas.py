"""Gradients of weights, by the formulas that autograd uses: same kernels on operands of the same layout, same bits.

Each formula takes the input of an operator, the gradient of its output, the weight, and what else it was given, and
returns the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Formula",
    "batched_left",
    "batched_right",
    "conv_both",
    "conv_weight",
    "embedding",
    "linear",
    "mm_left",
    "mm_right",
    "ready_made",
]

Formula = Callable[[Tensor, Tensor, Tensor, Any], Any]

_conv_backward = torch.ops.aten.convolution_backward.default
_embedding_backward = torch.ops.aten.embedding_dense_backward.default


def linear(x: Tensor, dy: Tensor, weight: Tensor, extra: Any) -> Tensor:
    """Return the gradient of the weight of `F.linear`; autograd sees a product with `weight.t()`."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
        dy = dy.reshape(-1, dy.shape[-1])
    if weight.is_contiguous():
        return torch.mm(dy.t(), x)
    return _right(x, dy, weight.t()).t()


def mm_right(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[bool, Any]) -> Tensor:
    """Return the gradient of the right factor of a product of matrices; `extra` is (transposed, factor)."""
    transposed, alpha = extra
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
        dy = dy.reshape(-1, dy.shape[-1])
    grad = _right(x, dy, weight.t() if transposed else weight)
    if alpha != 1:
        grad = grad * alpha
    return grad.t() if transposed else grad


def mm_left(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[bool, Any]) -> Tensor:
    """Return the gradient of the left factor of a product of two matrices; `extra` is (transposed, factor)."""
    transposed, alpha = extra
    used = weight.t() if transposed else weight
    grad = torch.mm(x, dy.t()).t() if _column_major(used) else torch.mm(dy, x.t())
    if alpha != 1:
        grad = grad * alpha
    return grad.t() if transposed else grad


def batched_right(x: Tensor, dy: Tensor, weight: Tensor, extra: Any) -> Tensor:
    """Return the gradient of the right factor of a batch of products; `extra` is a factor."""
    grad = torch.bmm(x.transpose(1, 2), dy)
    return grad if extra == 1 else grad * extra


def batched_left(x: Tensor, dy: Tensor, weight: Tensor, extra: Any) -> Tensor:
    """Return the gradient of the left factor of a batch of products; `extra` is a factor."""
    grad = torch.bmm(dy, x.transpose(1, 2))
    return grad if extra == 1 else grad * extra


def conv_weight(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[Any, ...]) -> Tensor:
    """Return the gradient of the weight of a convolution; `extra` is (bias, stride, padding, dilation, groups)."""
    grad: Tensor = _conv(x, dy, weight, extra, [False, True, False])[1]
    return grad


def conv_both(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias of a convolution: one call, as some backends make both at once."""
    _, grad, bias = _conv(x, dy, weight, extra, [False, True, True])
    return grad, bias


def _conv(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[Any, ...], mask: list[bool]) -> Any:
    bias, stride, padding, dilation, groups = extra
    if x.dim() < weight.dim():
        x = x.unsqueeze(0)
    if dy.dim() < weight.dim():
        dy = dy.unsqueeze(0)
    if weight.dtype is not dy.dtype:
        # Autocast; values do not matter.
        weight = torch.empty_like(weight, dtype=dy.dtype)
    sizes = None if bias is None else [weight.shape[0]]
    zeros = [0] * len(stride)
    return _conv_backward(dy, x, weight, sizes, stride, padding, dilation, False, zeros, groups, mask)


def embedding(x: Tensor, dy: Tensor, weight: Tensor, extra: tuple[int, bool]) -> Tensor:
    """Return the gradient of an embedding's table; `extra` is (padding index, whether scaled by frequency)."""
    grad: Tensor = _embedding_backward(dy, x, weight.shape[0], extra[0], extra[1])
    return grad


def ready_made(x: Tensor, dy: Tensor, weight: Tensor, extra: Any) -> Tensor:
    """Return a gradient that autograd made already."""
    return dy


def _column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _right(x: Tensor, dy: Tensor, used: Tensor) -> Tensor:
    if _column_major(used):
        return torch.mm(dy.t(), x).t()
    return torch.mm(x.t(), dy)
