"""A GPT for one device, written by hand for one rank of a dp x tp mesh, on our DTensors, and on torch's."""

from __future__ import annotations

import copy
import math
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from vescale_dtensor import Replicate, Shard, parallelize_module

__all__ = ["PLAN", "ByHand", "Model", "Sizes", "explicit", "fused", "sharded", "torch_parallel", "torch_sharded"]

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
    """Blocks; 0: one block alone, between its input and a squared error."""
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

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the input and the target of the whole batch."""
        generator = torch.Generator().manual_seed(1)
        if not self.layers:
            x, y = torch.randn(2, self.batch, self.length, self.width, generator=generator).unbind()
            return x, y
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's fused causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of two products, for torch's DTensor has no rule for the fused one on CPU."""
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1]), -1), v)


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        width = sizes.width
        self.per_head, self.attention = width // sizes.heads, attention
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, _ = x.shape
        z = self.n1(x)
        q, k, v = (p(z).view(batch, length, -1, self.per_head).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, -1)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    """A small language model, or one block; returns its loss."""

    def __init__(self, sizes: Sizes, attention: Attention = fused) -> None:
        super().__init__()
        self.sizes = sizes
        self.blocks = nn.ModuleList(Block(sizes, attention) for _ in range(max(1, sizes.layers)))
        if sizes.layers:
            self.tokens, self.places = embeddings(sizes)
            self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy; of one block, the mean squared error.

        Args:
            x: numbers [batch, length]; for one block, features [batch, length, width].
            targets: the token after each; for one block, like `x`.
        """
        if not self.sizes.layers:
            return (self.blocks[0](x) - targets).square().mean()  # torch's DTensor has twice mse_loss's gradient
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def embeddings(sizes: Sizes) -> tuple[nn.Embedding, nn.Embedding]:
    """Make those of tokens and of positions."""
    return nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.length, sizes.width)


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
        z = self._copied(self.n1(x))
        q, k, v = (
            p(z).view(batch, length, self.heads, self.per_head).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(batch, length, -1)
        x = x + self._row(self.o, y)
        return x + self._row(self.down, F.gelu(self.up(self._copied(self.n2(x)))))

    def _copied(self, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return x
        copied: Tensor = Copy.apply(x, self.group)
        return copied

    def _row(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.linear(x, linear.weight, linear.bias)
        summed: Tensor = Reduce.apply(F.linear(x, linear.weight), self.group)
        return summed + linear.bias


class ByHand(nn.Module):
    """The same model for one rank of a mesh, in local numbers; `finish` sums gradients over dp.

    Like the model it divides by the number of targets that count, of all ranks; that sum is under way while the model
    runs. The loss that it returns is this rank's part.

    Args:
        sizes: of the whole model.
        mesh: with axes "dp" and "tp".
        attention: of heads.
        bucket: sum all gradients in one tensor after backward; else each by itself, as it comes.
    """

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, attention: Attention = fused, *, bucket: bool = True) -> None:
        super().__init__()
        self.sizes, self.bucket = sizes, bucket
        tp, self.dp = mesh.get_group("tp"), mesh.get_group("dp")
        self.ranks = self.dp.size()
        self.blocks = nn.ModuleList(HandBlock(sizes, attention, tp) for _ in range(max(1, sizes.layers)))
        if sizes.layers:
            self.tokens, self.places = embeddings(sizes)
            self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
            self.register_buffer("numbers", torch.arange(sizes.length), persistent=False)
        for parameter in () if bucket or self.ranks == 1 else self.parameters():
            parameter.register_hook(self._sum)

    def _sum(self, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=self.dp)
        return grad

    def finish(self) -> None:
        """Sum the gradients over dp, where that is not done yet."""
        if not self.bucket or self.ranks == 1:
            return
        parameters = list(self.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(flat, group=self.dp)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's part of the mean over all ranks; arguments are those of this rank."""
        if not self.sizes.layers:
            return (self.blocks[0](x) - targets).square().mean() / self.ranks
        targets = targets.view(-1)
        count = (targets != -100).sum()
        work = dist.all_reduce(count, group=self.dp, async_op=True) if self.ranks > 1 else None
        x = self.tokens(x) + self.places(self.numbers)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        total = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets, reduction="sum")
        if work is not None:
            work.wait()
        return total / count

    def load(self, whole: nn.Module, rank: int, ranks: int) -> ByHand:
        """Take this rank's parts of the parameters of a whole model."""
        sources = dict(whole.named_parameters())
        for name, own in self.named_parameters():
            part = sources[name].detach()
            for pattern, placements in PLAN["parameter"].items():
                if re.fullmatch(pattern, name):
                    part = part.chunk(ranks, placements["tp"].dim)[rank]
            own.data.copy_(part)
        return self


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy on our DTensors."""
    return parallelize_module(copy.deepcopy(model), mesh, PLAN)


def torch_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy all of whose tensors are torch's DTensors."""
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


def torch_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy as torch's tutorials make one: `parallelize_module` over tp, `fully_shard` over dp.

    Its linear layers take and return plain local tensors, so that the rest of the model knows nothing of DTensors.
    """
    model = copy.deepcopy(model)
    styles = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {name: RowwiseParallel() for name in ("o", "down")}
    torch_parallelize_module(model, mesh["tp"], {f"blocks.*.{n}": s for n, s in (styles | rows).items()})
    if mesh.size(0) > 1:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    return model
