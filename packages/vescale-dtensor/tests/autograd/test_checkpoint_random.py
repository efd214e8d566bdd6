"""Dropout inside activation checkpointing: the recomputation draws what the forward drew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import distribute_tensor, random_mode
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements


def _part(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.gelu(F.linear(x, w)), 0.3).pow(2)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mode", ["shard", "whole"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("codes", [("S0 I", "I S0"), ("S0 S1", "I S1"), ("I I", "I I")], ids=str)
def test_recomputation_draws_the_same(codes: tuple[str, str], reentrant: bool, mode: str) -> None:
    mesh = cached_mesh(2, 2)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((8, 6), (6, 6))]
    grads = []
    for recompute in (False, True):
        x, w = (distribute_tensor(a, mesh, placements(c)).requires_grad_() for a, c in zip(args, codes, strict=True))
        torch.manual_seed(5)
        with random_mode(mode):  # type: ignore[arg-type]
            y = checkpoint(_part, x, w, use_reentrant=reentrant) if recompute else _part(x, w)
            torch.rand(3)  # the stream has moved on by the time of the recomputation
            y.sum().backward()
        grads.append((y.detach().full_tensor(), x.grad.full_tensor(), w.grad.full_tensor()))
    for once, again in zip(*grads, strict=True):
        assert torch.equal(once, again)
