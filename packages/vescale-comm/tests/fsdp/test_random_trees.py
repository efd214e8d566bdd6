"""Any tree of modules, with shared, frozen and unused parameters: gradients are those of one device."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm._fsdp import fully_shard
from vescale_comm._plan import Block, Rows, Whole
from vescale_comm.emulator import emulate

WIDTH = 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Node(nn.Module):
    """Runs its children one after the other, maybe around a weight of its own, maybe recomputed in backward."""

    def __init__(self, children: list[nn.Module], own: bool, recompute: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(children)
        self.own = nn.Parameter(torch.eye(WIDTH)) if own else None
        self.recompute = recompute

    def run(self, x: Tensor) -> Tensor:
        for member in self.members:
            x = torch.tanh(member(x))
        return x if self.own is None else x @ self.own

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x))


def grow(rng: random.Random, depth: int) -> nn.Module:
    kind = rng.choice(["linear", "norm", "scale", "node", "node"] if depth else ["linear", "norm", "scale"])
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5)
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "scale":
        return Scale()
    children = [grow(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return Node(children, rng.random() < 0.5, rng.random() < 0.25)


def make(seed: int) -> nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Node([grow(rng, 2) for _ in range(rng.randint(1, 4))], True, False).double()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linears) > 1 and rng.random() < 0.5:
        rng.choice(linears).weight = rng.choice(linears).weight
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.8)
    return model


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    world=st.integers(1, 4),
    units=st.sampled_from(["auto", [Node], [nn.Linear, Scale], []]),
    granularity=st.sampled_from([1, 5, Rows(1), Block(2, 2), Whole()]),
    options=st.fixed_dictionaries({"reshard_after_forward": st.booleans(), "prefetch": st.integers(0, 2)}),
)
def test_gradients(seed: int, world: int, units: Any, granularity: Any, options: dict[str, Any]) -> None:
    def on_rank(rank: int) -> None:
        reference = make(seed)
        model = copy.deepcopy(reference)
        if not any(isinstance(module, nn.Linear | Scale | Node) for module in list(model.modules())[1:]):
            units_here: Any = "auto"
        else:
            present = tuple(type(module) for module in model.modules())
            units_here = units if isinstance(units, str) else [cls for cls in units if cls in present]
        fully_shard(model, units=units_here, granularity=granularity, **options)
        inputs = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(world)]
        for _ in range(2):
            for one in (reference, model):
                one.zero_grad()
            loss = model(inputs[rank]).square().sum()
            if loss.requires_grad:
                loss.backward()
                sum(reference(x).square().sum() / world for x in inputs).backward()  # type: ignore[union-attr]
            for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                if whole.grad is None:
                    assert parameter.grad is None, name
                    continue
                info = parameter.vescale
                own = whole.grad.reshape(-1)[info.start : info.stop]
                torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-11, msg=name)

    emulate(on_rank, world, "canonical")
