"""Autograd nodes of this package: entered more quickly, the same otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor._comm.nodes import applied


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def test_a_node_is_that_of_the_function() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = applied(Scale)(x, 3.0)
    assert type(y.grad_fn).__name__ == "ScaleBackward"
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad.tolist() == [3.0, 3.0]
    with torch.no_grad():
        assert not applied(Scale)(x, 3.0).requires_grad


def test_transforms_of_functions_see_it() -> None:
    """Torch refuses a function that has no rule for them, rather than to compute something else."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: applied(Scale)(x, 3.0).sum())(torch.ones(2))
