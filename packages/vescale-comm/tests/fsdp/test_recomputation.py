"""Activation checkpointing of both kinds, around units, inside of them, and over shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm._fsdp import fully_shard
from vescale_comm.emulator import emulate


class Layer(nn.Module):
    """A block; `how` is "inside" to recompute its parts, one by one."""

    def __init__(self, width: int, how: str, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.adapter = nn.Linear(width, 1, bias=False)
        self.how, self.reentrant = how, reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inside":
            # The same weights twice, so backward brings their gradients twice when recomputed by reentrance.
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        else:
            x = self.part(self.part(x))
        return x + self.second(x) * self.adapter(x)


class Model(nn.Module):
    def __init__(self, how: str, reentrant: bool, shared: bool, width: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width, how, reentrant) for _ in range(blocks))
        self.how, self.reentrant = how, reentrant
        if shared:
            self.blocks[2].second.weight = self.blocks[0].second.weight

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.how == "around":
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            elif self.how == "twice" and number == 1:
                x = checkpoint(block, checkpoint(block, x, use_reentrant=self.reentrant), use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x


def make(*args: Any) -> Model:
    torch.manual_seed(2)
    return Model(*args).double()


def check(how: str, reentrant: bool, shared: bool, frozen: bool = False, **options: Any) -> None:
    def on_rank(rank: int) -> None:
        reference, model = make("", False, shared), make(how, reentrant, shared)
        for one in (reference, model):
            if how == "twice":
                one.blocks[1] = nn.Sequential(one.blocks[1])  # of another class, to be called twice
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(not frozen or "adapter" in name)
        fully_shard(model, **options)
        inputs = [torch.full((2, 4), 0.3 * (other + 1), dtype=torch.float64) for other in range(2)]
        for _ in range(3):
            for one in (reference, model):
                one.zero_grad()
            model(inputs[rank].clone().requires_grad_()).square().sum().backward()
            for x in inputs:
                for number, block in enumerate(reference.blocks):
                    x = block(block(x)) if how == "twice" and number == 1 else block(x)
                (x.square().sum() / 2).backward()
            for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                if whole.grad is None:
                    assert parameter.grad is None
                    continue
                own = whole.grad.reshape(-1)[parameter.vescale.start : parameter.vescale.stop]
                torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-12, msg=name)
            for one in (reference, model):
                torch.optim.SGD(one.parameters(), lr=0.1).step()

    emulate(on_rank, 2, "canonical")


@pytest.mark.parametrize("how", ["around", "inside", "twice"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_recomputed_blocks(how: str, reentrant: bool, shared: bool) -> None:
    # In torch DDP weights shared by blocks that are recomputed by reentrance are quietly reduced too early.
    check(how, reentrant, shared)


@pytest.mark.parametrize("how", ["around", "inside", "twice"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_frozen_weights_with_adapters(how: str, reentrant: bool) -> None:
    check(how, reentrant, shared=False, frozen=True)


def test_units_inside_of_what_is_recomputed() -> None:
    for reentrant in (True, False):
        check("around", reentrant, shared=False, units=[nn.Linear])
        check("inside", reentrant, shared=False, units=[nn.Linear], reshard_after_forward=False)


def test_the_whole_model_recomputed() -> None:
    def on_rank(rank: int) -> None:
        for reentrant in (True, False):
            reference, model = make("", False, False), fully_shard(make("", False, False))
            inputs = [torch.full((2, 4), 0.3 * (other + 1), dtype=torch.float64) for other in range(2)]
            for _ in range(2):
                model.zero_grad()
                x = inputs[rank].clone().requires_grad_()
                first = checkpoint(model, x, use_reentrant=reentrant)
                (first + checkpoint(model, x * 2, use_reentrant=reentrant)).square().sum().backward()
                reference.zero_grad()
                for x in inputs:
                    ((reference(x) + reference(x * 2)).square().sum() / 2).backward()
                for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                    own = whole.grad.reshape(-1)[parameter.vescale.start : parameter.vescale.stop]
                    torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-12, msg=name)

    emulate(on_rank, 2, "canonical")
