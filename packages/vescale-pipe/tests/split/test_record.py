"""What surrounds calls: checkpoints, contexts, autograd functions, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_pipe._split import split


def check(model: nn.Module, x: Tensor, **options: Any) -> Any:
    """Split a model and compare the result and all gradients with a copy that is not split."""
    whole = copy.deepcopy(model)
    graph = split(model, example_args=(x,), **options)
    torch.manual_seed(1)
    out = graph.run(x.clone())
    torch.manual_seed(1)
    expected = whole(x.clone())
    assert torch.equal(out, expected)
    assert out.dtype == expected.dtype
    out.sum().backward()
    expected.sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    return graph


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_between_modules(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    graph = check(model, torch.randn(4, 8, requires_grad=True), at=["layers.1", "layers.3"])
    calls: list[int] = []
    model.train()
    model.layers[2].register_forward_pre_hook(lambda module, args: calls.append(1))
    graph.run(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert len(calls) == 2  # once forward, once again


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3  # on purpose not its derivative


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = Double.apply(self.a(x))
        with torch.no_grad():
            fixed = self.b(h)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = h @ fixed.t()
        return self.c(h) + half.float().sum() + fixed.detach().T.T


def test_autograd_function_and_contexts() -> None:
    graph = check(WithFunction(), torch.randn(4, 8), at=["b", "c"])
    flags = {crossing.text: crossing.dtype for crossing in graph.crossings}
    assert torch.bfloat16 in flags.values()
    assert graph.stages[1].output_needs_grad.count(False) == 1


@pytest.mark.parametrize("stages", [1, 3])
def test_autocast_around_all(stages: int) -> None:
    model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(8, 8), nn.Tanh())])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = check(model, torch.randn(4, 8), num_stages=stages)
    assert all(crossing.dtype == torch.bfloat16 for crossing in graph.crossings)


def test_inference_mode_around_all() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with torch.inference_mode():
        x = torch.randn(4, 8) * 2
        graph = split(model, at=["2"], example_args=(x,))
        assert torch.equal(graph.run(x), model(x))
    graph.run(torch.randn(4, 8)).sum().backward()
    assert model[0].weight.grad is not None


class Drawing(nn.Module):
    """Draws from a generator of its own: once per forward, though the numbers do not depend on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(8, generator=self.generator)
        return self.b(self.a(x) * noise) + noise


def test_a_generator_of_the_model() -> None:
    model, x = Drawing(), torch.randn(4, 8)
    graph = split(model, at=["b"], example_args=(x,))
    model.generator.manual_seed(0)
    out = graph.run(x)
    model.generator.manual_seed(0)
    assert torch.equal(out, model(x))
