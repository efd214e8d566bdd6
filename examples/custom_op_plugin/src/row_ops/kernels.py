"""A kernel launched as Triton launches them, ``kernel[grid](...)``, and the Python function around it.

The kernel is a stand-in that runs on CPUs; with Triton it would be a function under `@triton.jit`, and the rest
would read the same. Kernels work on memory: they must get local parts, never a whole that is distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


class Kernel:
    """Runs a program once per position of a grid."""

    def __init__(self, program: Callable[..., None]) -> None:
        self.program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            strange = [type(a).__name__ for a in args if isinstance(a, Tensor) and type(a) is not Tensor]
            if strange:
                raise TypeError(f"a kernel takes plain tensors, got {strange}")
            for pid in range(grid[0]):
                self.program(pid, *args)

        return launch


@Kernel
def _multiply(pid: int, out: Tensor, x: Tensor, w: Tensor, columns: int) -> None:
    row = slice(pid * columns, (pid + 1) * columns)
    out.view(-1)[row] = x.view(-1)[row] * w


class _ScaleColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        columns = x.shape[-1]
        _multiply[(x.numel() // max(columns, 1),)](out, x.detach(), w.detach(), columns)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return scale_columns(grad, w), (grad * x).flatten(0, -2).sum(0)


def scale_columns(x: Tensor, w: Tensor) -> Tensor:
    """Multiply each row by `w`.

    Args:
        x: of shape (..., columns).
        w: of shape (columns,).
    """
    if has_torch_function((x, w)):  # PyTorch's protocol: what is no plain tensor decides what happens
        return handle_torch_function(scale_columns, (x, w), x, w)  # type: ignore[no-any-return]
    return _ScaleColumns.apply(x, w)  # type: ignore[no-any-return, no-untyped-call]
