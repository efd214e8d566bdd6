"""Autocast: a weight is cast once per region, and its shares are added up before the cast goes backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def on(**options: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


class Own(nn.Module):
    """A weight, a bias, and a function of both."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w, self.b)


def inputs(*shape: int) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


def chain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(F.linear(x, w, b), w), w, b)


def regions(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    for _ in range(3):
        with on():
            x = F.linear(F.linear(x, w, b), w)
    return F.linear(x.float(), w)


def uncached(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with on(cache_enabled=False):
        return chain(x, w, b)


def off_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = F.linear(x, w, b)
    with on(enabled=False):
        return F.linear(x.float(), w)


WHOLE: dict[str, Callable[..., Tensor]] = {
    "three uses": chain,
    "with a transpose": lambda x, w, b: chain(x, w, b) @ w.T,
    "two transposes": lambda x, w, b: x @ w.T @ w.T,
    "off inside": off_inside,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
}


@pytest.mark.parametrize("name", WHOLE)
def test_on_around_a_stage(compare: Any, name: str) -> None:
    outcome = compare(Own(WHOLE[name]), inputs(8, 8), context=on)
    assert (outcome.wrong, outcome.deferred) == ([], ["w"])


@pytest.mark.parametrize("call", [regions, uncached])
def test_on_inside_a_stage(compare: Any, call: Any) -> None:
    outcome = compare(Own(call), inputs(8, 8))
    assert (outcome.wrong, outcome.deferred) == ([], ["w"])


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_in_another_layout(compare: Any, bias: bool) -> None:
    xs = [x.detach().transpose(0, 1).requires_grad_() for x in inputs(5, 3, 8)]
    module = nn.Linear(8, 8, bias=bias)
    outcome = compare(module, xs, lambda module, x: module(x * 1), on)
    assert (outcome.wrong, outcome.deferred) == ([], [] if bias else ["weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes(compare: Any, dtype: torch.dtype) -> None:
    layers = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype))
    outcome = compare(layers, [x.detach().to(dtype).requires_grad_() for x in inputs(4, 8)], context=on)
    assert (outcome.wrong, outcome.deferred) == ([], ["0.weight", "1.weight"])


def test_convolutions_cast_their_bias_too(compare: Any) -> None:
    layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    outcome = compare(layers, inputs(2, 4, 8, 8), context=on)
    assert (outcome.wrong, len(outcome.deferred)) == ([], 4)


def test_tied_embedding_and_head(compare: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.embed(ids))
            return y

    outcome = compare(Tied(), [torch.randint(0, 11, (3, 4)) for _ in range(3)], context=on)
    assert (outcome.wrong, outcome.deferred) == ([], ["embed.weight"])


def test_a_leaf_whose_cast_autocast_remembers_is_left_to_it(compare: Any) -> None:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        y: Tensor = module(leaf) + module(leaf)
        return y + x

    outcome = compare(nn.Linear(8, 8), inputs(4, 8), call, on)
    assert (outcome.wrong, outcome.deferred) == ([], [])
