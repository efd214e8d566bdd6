"""The transformer block of the benchmarks: plain, hand-written for tensor parallel ranks, and sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 64, 4


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without the fused operator, for which torch's DTensor has no rule on CPU."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, -1)
    return torch.matmul(weights, v)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's fused causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """A pre-norm transformer block of 16 parameters."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_attention) -> None:
        super().__init__()
        self.attention = attention
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, _ = x.shape
        z = self.n1(x)
        q, k, v = (p(z).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, WIDTH)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class HandParallelBlock(nn.Module):
    """What a careful person writes for one of `ranks` tensor parallel ranks: local tensors, two collectives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: int,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_attention,
    ) -> None:
        super().__init__()
        self.attention, self.group = attention, group
        self.heads = HEADS // ranks
        part = WIDTH // ranks
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, part) for _ in range(3))
        self.o = nn.Linear(part, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * part), nn.Linear(4 * part, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, _ = x.shape
        z = Copy.apply(self.n1(x), self.group)
        q, k, v = (
            p(z).view(batch, length, self.heads, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, -1)
        x = x + Reduce.apply(F.linear(y, self.o.weight), self.group) + self.o.bias
        z = Copy.apply(self.n2(x), self.group)
        y = F.linear(F.gelu(self.up(z)), self.down.weight)
        return x + Reduce.apply(y, self.group) + self.down.bias


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the group (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Sum over the group whose gradient is passed on (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


COLUMN_ROW = {"q": (0, 0), "k": (0, 0), "v": (0, 0), "up": (0, 0), "o": (1, None), "down": (1, None)}
"""Tensor dims that tensor parallelism shards, of weight and bias per linear layer; the rest is whole."""


def sharded(
    module: nn.Module, make: Callable[[Tensor, int | None], Tensor], dims: Mapping[str, tuple[int | None, ...]]
) -> nn.Module:
    """Return a copy of a module whose parameters are what `make(parameter, sharded dim)` returns."""
    module = copy.deepcopy(module)
    for prefix, child in module.named_modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            dim = dims.get(prefix, (None, None))[name == "bias"]
            child.register_parameter(name, nn.Parameter(make(parameter.detach(), dim)))
    return module


def train_step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a function that does forward, backward, and the dropping of gradients."""
    parameters = [*module.parameters(), x]

    def step() -> None:
        module(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step
