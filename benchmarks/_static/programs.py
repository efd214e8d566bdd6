"""A GPT for one device, written by hand for one rank of a dp x tp mesh, on our DTensors, and on torch's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from _programs import Copy, Reduce
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import Replicate, Shard, parallelize_module

__all__ = ["GPT", "PLAN", "HandGPT", "Sizes", "explicit", "fused", "sharded", "torch_sharded"]

PLAN: dict[str, Any] = {
    "parameter": {
        r".*\.(q|k|v|up)\.(weight|bias)": {"tp": Shard(0)},
        r".*\.(o|down)\.weight": {"tp": Shard(1)},
    },
    "forward": {"input": {"dp": Shard(0)}},
}
"""Megatron's: heads and hidden features are cut over tp, the batch over dp."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batch."""

    layers: int
    """Blocks."""
    width: int
    """Features."""
    heads: int = 4
    """Attention heads."""
    vocabulary: int = 128
    """Tokens."""
    length: int = 32
    """Positions."""
    batch: int = 4
    """Sequences, of all ranks together."""


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's fused causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of two products, for torch's DTensor has no rule for the fused one on CPU."""
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, -1), v)


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        width = sizes.width
        self.sizes, self.attention = sizes, attention
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, width = x.shape
        heads = self.sizes.heads
        z = self.n1(x)
        q, k, v = (p(z).view(batch, length, heads, width // heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """A small language model; returns its loss."""

    def __init__(self, sizes: Sizes, attention: Attention = fused) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, attention) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy.

        Args:
            tokens: numbers [batch, length].
            targets: the token after each.
        """
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class HandBlock(nn.Module):
    """What a careful person writes for one rank: local parts, two collectives each way."""

    def __init__(self, sizes: Sizes, attention: Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        width, part = sizes.width, sizes.width // group.size()
        self.attention, self.group = attention, group
        self.heads, self.per_head = sizes.heads // group.size(), width // sizes.heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, part) for _ in range(3))
        self.o = nn.Linear(part, width)
        self.up, self.down = nn.Linear(width, 4 * part), nn.Linear(4 * part, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, _ = x.shape
        z = Copy.apply(self.n1(x), self.group)
        q, k, v = (
            p(z).view(batch, length, self.heads, self.per_head).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, -1)
        x = x + Reduce.apply(F.linear(y, self.o.weight), self.group) + self.o.bias
        z = Copy.apply(self.n2(x), self.group)
        return x + Reduce.apply(F.linear(F.gelu(self.up(z)), self.down.weight), self.group) + self.down.bias


class HandGPT(nn.Module):
    """The same model for one rank of a mesh, in local numbers; gradients are summed over dp by hooks."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, attention: Attention = fused) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.length, sizes.width)
        tp, self.dp = mesh.get_group("tp"), mesh.get_group("dp")
        self.blocks = nn.ModuleList(HandBlock(sizes, attention, tp) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for parameter in self.parameters() if self.dp.size() > 1 else ():
            parameter.register_hook(self._sum)

    def _sum(self, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=self.dp)
        return grad

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over all ranks; arguments are those of this rank."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1)) / self.dp.size()
        return Reduce.apply(loss, self.dp) if self.dp.size() > 1 else loss

    def load(self, whole: nn.Module, rank: int, ranks: int) -> HandGPT:
        """Take this rank's parts of the parameters of a whole model."""
        for (name, own), source in zip(self.named_parameters(), whole.parameters(), strict=True):
            part = source.detach()
            for pattern, placements in PLAN["parameter"].items():
                if re.fullmatch(pattern, name):
                    part = part.chunk(ranks, placements["tp"].dim)[rank]
            own.data.copy_(part)
        return self


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy on our DTensors."""
    return parallelize_module(copy.deepcopy(model), mesh, PLAN)


def torch_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy on torch's DTensors."""
    model = copy.deepcopy(model)
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = Replicate()
            for pattern, placements in PLAN["parameter"].items():
                if re.fullmatch(pattern, f"{prefix}.{name}"):
                    cut = placements["tp"]
            made = torch_tensor.distribute_tensor(parameter.detach(), mesh, [Replicate(), cut], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(made))
    return model
