"""Random models, groups, freezing and usage: a sharded optimizer does what one device does."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vescale_comm._optimizer.optimizer import DistributedOptimizer

STEPS = 4


class Case:
    """One model and its history, drawn from a seed, so that all ranks draw the same."""

    def __init__(self, seed: int, world: int) -> None:
        dice = random.Random(seed)
        self.seed = seed
        self.widths = [dice.randint(1, 9) for _ in range(dice.randint(1, 6))]
        self.shared = [(i, j) for j in range(len(self.widths)) for i in range(j) if self.widths[i] == self.widths[j]]
        self.frozen = [dice.random() < 0.2 for _ in self.widths]
        self.frozen[0] = False
        self.groups = [dice.randint(0, 2) for _ in self.widths]
        layers = range(len(self.widths))
        self.used = [[[i for i in layers if dice.random() < 0.7] for _ in range(world)] for _ in range(STEPS)]
        self.freeze_later = dice.randrange(len(self.widths)) if dice.random() < 0.3 else None
        self.options: dict[str, Any] = {
            "zero": dice.choice([1, 2]),
            "plan": dice.choice(["flat", "whole", {r".*\.weight": dice.choice([2, 4]), ".*": "flat"}]),
            "bucket_mb": dice.choice([1e-6, 2e-4, 1]),
            "transport": dice.choice(["p2p", "shared"]),
        }

    def build(self) -> nn.ModuleList:
        torch.manual_seed(self.seed)
        layers = nn.ModuleList(nn.Linear(3, width, bias=width % 2 == 0) for width in self.widths).double()
        for i, j in self.shared[:1]:
            layers[j].weight = layers[i].weight
        for layer, frozen in zip(layers, self.frozen, strict=True):
            if frozen:
                layer.requires_grad_(False)
        return layers

    def groups_of(self, model: nn.ModuleList) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"params": [], "lr": 0.01 * (number + 1)} for number in range(3)]
        seen: set[int] = set()
        for name, parameter in model.named_parameters():
            group = self.groups[int(name.split(".")[0])]
            if id(parameter) not in seen:
                found[group]["params"].append((name, parameter))
                seen.add(id(parameter))
        return [group for group in found if group["params"]]

    def loss(self, model: nn.ModuleList, x: Tensor, step: int, rank: int) -> Tensor:
        total = x.new_zeros(()).requires_grad_()
        for i in self.used[step][rank]:
            total = total + model[i](x[rank]).square().mean()
        return total

    def change(self, model: nn.ModuleList, step: int) -> None:
        if step == 2 and self.freeze_later is not None:
            model[self.freeze_later].requires_grad_(False)


@pytest.mark.ranks(3, pool=True)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_model_trains_as_on_one_device(rank: int, world: int, seed: int) -> None:
    case = Case(seed, world)
    model, reference = case.build(), case.build()
    data = torch.randn(STEPS, world, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = DistributedOptimizer(case.groups_of(model), torch.optim.AdamW, model=model, **case.options)
    alone = torch.optim.AdamW(
        [{**group, "params": [p for _, p in group["params"] if p.requires_grad]} for group in case.groups_of(reference)]
    )
    try:
        for step, x in enumerate(data):
            case.change(model, step)
            case.change(reference, step)
            optimizer.zero_grad()
            alone.zero_grad()
            case.loss(model, x, step, rank).backward()
            sum(case.loss(reference, x, step, other) / world for other in range(world)).backward()  # type: ignore[union-attr]
            norm = optimizer.clip_grad_norm_(0.5)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(trained, 0.5).to(norm.dtype))
            optimizer.step()
            alone.step()
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    finally:
        optimizer.close()
