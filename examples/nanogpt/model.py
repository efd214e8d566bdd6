"""A GPT in plain PyTorch, in the manner of nanoGPT. Nothing here knows of devices, ranks or sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocab_size: int = 256
    block_size: int = 64
    """Longest sequence, in tokens."""
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.1
    """Probability of zeroing an element of embeddings, attention weights and residual branches."""
    bias: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd = {self.n_embd} must be a multiple of n_head = {self.n_head}")


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.k_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, n_embd] for an input of that shape."""
        batch, length, width = x.size()

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.n_head, self.head_dim).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            heads(self.q_proj(x)),
            heads(self.k_proj(x)),
            heads(self.v_proj(x)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        out: Tensor = self.resid_dropout(self.o_proj(y))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, n_embd] for an input of that shape."""
        out: Tensor = self.dropout(self.down(self.act(self.up(x))))
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalized input and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, n_embd] for an input of that shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Draw the initial parameters, in an order that follows from the model alone."""
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down.weight")):  # two additions to the residual per layer
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits [batch, length, vocab_size] and, where there are targets, the mean cross entropy.

        Args:
            idx: token numbers [batch, length], at most `block_size` long.
            targets: the token that follows each of `idx`.
        """
        length = idx.size(1)
        if length > self.config.block_size:
            raise ValueError(f"idx is {length} tokens long, the model has {self.config.block_size} positions")
        positions = torch.arange(length, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
