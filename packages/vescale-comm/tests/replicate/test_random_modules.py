"""Random module trees, with random sharing, freezing and use, against one device."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm._replicate import replicate, replicated

RANKS, STEPS, LAYERS = 2, 4, 4


class Tree(nn.Module):
    """Layers, some of which are one object, that run in any order, any number of times, or not at all."""

    def __init__(self, shared: list[int], nested: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, like in enumerate(shared):
            layers.append(layers[like] if like < number else nn.Linear(3, 3, bias=number % 2 == 0, dtype=torch.float64))
        self.layers = nn.ModuleList(layers[:2])
        self.rest: nn.Module = (
            nn.ModuleDict({"inner": nn.ModuleList(layers[2:])}) if nested else nn.ModuleList(layers[2:])
        )

    def forward(self, x: Tensor, use: list[tuple[int, int]]) -> Tensor:
        rest = self.rest["inner"] if isinstance(self.rest, nn.ModuleDict) else self.rest
        layers = [*self.layers, *rest]  # type: ignore[misc]
        for index, way in use:
            layer = layers[index]
            if way == 0:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(layer, x, use_reentrant=way == 1)
        return x


Use = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 2)), min_size=1, max_size=5)


@pytest.mark.ranks(RANKS, pool=True, timeout=120)
@given(
    shared=st.tuples(*(st.integers(0, LAYERS) for _ in range(LAYERS))),
    nested=st.booleans(),
    uses=st.lists(st.tuples(*(Use for _ in range(2 * RANKS))), min_size=STEPS, max_size=STEPS),
    frozen=st.lists(st.integers(-1, LAYERS - 1), min_size=STEPS, max_size=STEPS),
    bucket_mb=st.sampled_from([1e-6, 1e-4, 8]),
    zero=st.sampled_from([True, False, None]),
    view=st.booleans(),
)
@settings(max_examples=25, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
def test_gradients_are_those_of_one_device(
    rank: int,
    shared: tuple[int, ...],
    nested: bool,
    uses: list[tuple[list[tuple[int, int]], ...]],
    frozen: list[int],
    bucket_mb: float,
    zero: bool | None,
    view: bool,
) -> None:
    """Two micro-batches per step, in which each rank uses the layers that it likes; None: gradients are not zeroed."""
    torch.manual_seed(0)
    net = Tree(list(shared), nested)
    solo = copy.deepcopy(net)
    replicate(net, transport="p2p", bucket_mb=bucket_mb, view=view)
    pairs = list(zip(net.named_parameters(), solo.parameters(), strict=True))
    data = torch.randn(STEPS, RANKS, 2, 2, 3, dtype=torch.float64)
    for step, use in enumerate(uses):
        for (_, a), b in pairs:
            for param in (a, b):
                param.requires_grad_(id(param) not in _params_of(net, solo, frozen[step]))
                if zero is not None and param.grad is not None:
                    param.grad = None if zero else torch.zeros_like(param)
        for number in range(2):
            x = data[step, rank, number].clone().requires_grad_()
            loss = net(x, use[2 * rank + number]).sum()
            if number == 0:
                with replicated(net).no_sync():
                    loss.backward()
            else:
                loss.backward()
        replicated(net).finish_grad_sync()  # in case this rank used frozen layers only
        for other in range(RANKS):
            for number in range(2):
                x = data[step, other, number].clone().requires_grad_()
                (solo(x, use[2 * other + number]).sum() / RANKS).backward()
        for (name, a), b in pairs:
            if b.grad is None:
                assert a.grad is None, (step, name)
            else:
                assert a.grad is not None, (step, name)
                assert torch.allclose(a.grad, b.grad, atol=1e-12, rtol=1e-10), (step, name)
    replicated(net).close()


def _params_of(net: Tree, solo: Tree, layer: int) -> set[int]:
    """Return the identities of the parameters of one layer in both modules."""
    if layer < 0:
        return set()
    found = set()
    for module in (net, solo):
        rest = module.rest["inner"] if isinstance(module.rest, nn.ModuleDict) else module.rest
        found |= {id(param) for param in [*module.layers, *rest][layer].parameters()}  # type: ignore[misc]
    return found
