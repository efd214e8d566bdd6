"""Modules made on the meta device get the values that one device would have drawn, a unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import full_parameters, fully_shard
from vescale_comm.emulator import emulate
from vescale_comm.errors import PlanError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def reset(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("world", [1, 3])
def test_the_values_of_one_device(world: int) -> None:
    want = reset(Model())

    def on_rank(rank: int) -> None:
        with torch.device("meta"):
            model = Model()
        torch.manual_seed(0)
        fully_shard(model)
        assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])
        with full_parameters(model):
            for (name, got), whole in zip(model.named_parameters(), want.parameters(), strict=True):
                assert torch.equal(got, whole), name
        for (name, got), whole in zip(model.named_buffers(), want.buffers(), strict=True):
            assert torch.equal(got, whole), name
        assert model.head.weight is model.embed.weight
        model(torch.arange(7)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    emulate(on_rank, world, "canonical")


def test_modules_that_cannot_initialize_themselves() -> None:
    def on_rank(rank: int) -> None:
        with torch.device("meta"):
            model, other = nn.Sequential(Bare(), Bare()), nn.Sequential(Bare(), Bare())
        with pytest.raises(PlanError, match=r"Bare was made on the meta device and has no reset_parameters"):
            fully_shard(model)
        fully_shard(other, initialize=lambda module: nn.init.constant_(module.scale, 2.0))
        assert all(torch.equal(parameter, torch.full_like(parameter, 2.0)) for parameter in other.parameters())
        assert torch.equal(other(torch.ones(3)), torch.full((3,), 4.0))

    emulate(on_rank, 2, "canonical")
