"""A `torch.library` custom operator and a `torch.autograd.Function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("row_ops::normalize_rows", mutates_args=())
def normalize_rows(x: Tensor, eps: float) -> Tensor:
    """Divide each row (the last dim) by its length: ``x / sqrt(sum(x * x) + eps)``.

    Args:
        x: any shape and floating-point dtype.
        eps: added to the sum of squares.
    """
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


@normalize_rows.register_fake
def _(x: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.eps = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    length = (x.square().sum(-1, keepdim=True) + ctx.eps).sqrt()
    return (grad - x * (grad * x).sum(-1, keepdim=True) / length.square()) / length, None


normalize_rows.register_autograd(_backward, setup_context=_save)


class Quantize(torch.autograd.Function):
    """Round to multiples of `step`; the gradient goes straight through. Call ``Quantize.apply(x, step)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        """Round."""
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Pass on."""
        return grad, None
