"""Whole modules: which gradients wait, which do not, and that all have the bits of a whole backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def inputs(*shape: int) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


def tokens() -> list[Tensor]:
    return [torch.randint(0, 11, (3, 4)) for _ in range(3)]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


LINEARS = ["0.weight", "2.weight", "4.weight"]


class Own(nn.Module):
    """A weight, a bias, and a function of both."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 7) / 3)
        self.b = nn.Parameter(torch.randn(7))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w, self.b)


def reads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    assert w.shape == (7, 7)
    assert w.size(0) == w.dim() + 5
    assert w.device == w.detach().device
    return F.linear(x, w.to(w.dtype), b).type_as(w)


SEVERAL: dict[str, Callable[..., Tensor]] = {
    "three products": lambda x, w, b: F.linear(F.linear(F.linear(x, w, b), w), w, b),
    "both ways": lambda x, w, b: F.linear(x @ w.T, w) @ w.t(),
    "branches": lambda x, w, b: (F.linear(x, w) @ F.linear(x, w).T) @ F.linear(x, w, b),
    "other uses after": lambda x, w, b: F.linear(F.linear(x, w), w) * w.sum() + w,
    "other uses in between": lambda x, w, b: F.linear(F.linear(x, w) * w.mean(), w) * (w * w),
    "a transpose used after": lambda x, w, b: F.linear(x @ w.T, w) + w.T + (w.t() * 2).sum(),
    "in a list": lambda x, w, b: F.linear(F.linear(x, w), w) + torch.cat([w, w])[:7] + torch.stack((w, w)).sum(0),
    "by name": lambda x, w, b: F.linear(F.linear(x, w), w) + torch.mul(input=x, other=w),
    "read only": reads,
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_weight_used_several_times(compare: Any, name: str) -> None:
    outcome = compare(Own(SEVERAL[name]), inputs(7, 7))
    assert outcome.wrong == []
    assert "w" in outcome.deferred


EARLIER: dict[str, Callable[..., Tensor]] = {
    "a product": lambda x, w, b: F.linear(F.linear(x * w.mean(), w), w),
    "a transpose": lambda x, w, b: F.linear(F.linear(x + w.T, w), w),
}


@pytest.mark.parametrize("name", EARLIER)
def test_a_weight_that_something_else_used_first_is_left_to_autograd(compare: Any, name: str) -> None:
    outcome = compare(Own(EARLIER[name]), inputs(7, 7))
    assert (outcome.wrong, outcome.deferred) == ([], [])


def test_a_weight_that_is_not_used(compare: Any) -> None:
    outcome = compare(Own(lambda x, w, b: x * b), inputs(7, 7))
    assert outcome.wrong == []


def test_tied_embedding_and_head(compare: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.body = mlp()
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.body(self.embed(ids)))
            return y

    outcome = compare(Tied(), tokens())
    assert outcome.wrong == []
    assert outcome.deferred == ["embed.weight", "body.0.weight", "body.2.weight", "body.4.weight"]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_frozen_weights(compare: Any, delay: int) -> None:
    module = mlp()
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    for xs in (inputs(4, 8), [x.detach() for x in inputs(4, 8)]):
        outcome = compare(module, xs, delay=delay)
        assert (outcome.wrong, outcome.deferred) == ([], ["4.weight"])
        module.zero_grad()


@pytest.mark.parametrize("width", [{}, {"kdim": 8, "vdim": 8}, {"kdim": 6, "vdim": 6}])
def test_attention(compare: Any, width: dict[str, int]) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, **width)

    def cross(module: nn.Module, x: Tensor) -> Tensor:
        other = (x * 2)[..., : width.get("kdim", 8)]
        y: Tensor = module(x, other, other, need_weights=False)[0]
        return y

    outcome = compare(attention, inputs(2, 5, 8), cross)
    assert outcome.wrong == []
    assert "out_proj.weight" in outcome.deferred


def test_self_attention_is_split_with_its_projection(compare: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    outcome = compare(attention, inputs(2, 5, 8), lambda module, x: module(x, x, x)[0])
    assert (outcome.wrong, outcome.deferred) == ([], ["in_proj_weight", "out_proj.weight"])


def test_transformer_layer(compare: Any) -> None:
    outcome = compare(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), inputs(2, 5, 8))
    assert (outcome.wrong, len(outcome.deferred)) == ([], 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_left_alone(compare: Any, kind: Any) -> None:
    layers = nn.ModuleList([kind(8, 8, batch_first=True), nn.Linear(8, 8)])
    outcome = compare(layers, inputs(2, 5, 8), lambda module, x: module[1](module[0](x)[0]))
    assert (outcome.wrong, outcome.deferred) == ([], ["1.weight"])


class Product(torch.autograd.Function):
    """A product that owns the gradient of its weight."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        Product.backwards += 1
        x, weight = ctx.saved_tensors
        return dy @ weight.t(), x.t() @ dy


def test_a_function_of_the_user_runs_once(compare: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.own = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(Product.apply(self.layer(x), self.own))  # type: ignore[no-untyped-call]
            return y

    Product.backwards = 0
    outcome = compare(Mixed(), inputs(4, 8))
    assert (outcome.wrong, outcome.deferred) == ([], ["layer.weight"])
    assert Product.backwards == 2 * 3


def test_computed_weights_are_left_alone(compare: Any) -> None:
    layers = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8)
    )
    outcome = compare(layers, inputs(4, 8))
    assert (outcome.wrong, outcome.deferred) == ([], ["2.weight"])


def test_functional_call(compare: Any) -> None:
    def same(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = functional_call(module, dict(module.named_parameters()), (x,))
        return y

    def computed(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = functional_call(module, {name: p * 1 for name, p in module.named_parameters()}, (x,))
        return y

    outcome = compare(mlp(), inputs(4, 8), same)
    assert (outcome.wrong, outcome.deferred) == ([], LINEARS)
    outcome = compare(mlp(), inputs(4, 8), computed)
    assert (outcome.wrong, outcome.deferred) == ([], [])


def test_transforms_of_functions_are_left_alone(compare: Any) -> None:
    def mapped(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = torch.func.vmap(module)(x)
        return y

    outcome = compare(nn.Linear(8, 8), inputs(4, 8), mapped)
    assert (outcome.wrong, outcome.deferred) == ([], [])


class Checkpointed(nn.Module):
    """Three runs of weights, the second one checkpointed; some of the weights are outside of it too."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = mlp(), mlp()
        self.reentrant = reentrant
        self.runs: list[int] = []

    def inner(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        y: Tensor = self.b[4](self.a(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(checkpoint(self.inner, self.b(x), use_reentrant=self.reentrant))
        return y


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_run_again_once(compare: Any, reentrant: bool, autocast: bool) -> None:
    module = Checkpointed(reentrant)
    outcome = compare(
        module, inputs(4, 8), context=lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    )
    assert outcome.wrong == []
    assert set(outcome.deferred) == {f"{part}.{name}" for part in "ab" for name in LINEARS}
    assert len(module.runs) == 2 * 3


def test_a_checkpoint_inside_a_checkpoint(compare: Any) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(
                lambda x: self.one(checkpoint(self.two, self.one(x), use_reentrant=False)), x, use_reentrant=False
            )
            return y

    outcome = compare(Nested(), inputs(4, 8))
    assert (outcome.wrong, len(outcome.deferred)) == ([], 6)


def test_saved_tensors_elsewhere(compare: Any) -> None:
    outcome = compare(mlp(), inputs(4, 8), context=torch.autograd.graph.save_on_cpu)
    assert (outcome.wrong, outcome.deferred) == ([], LINEARS)


@pytest.mark.parametrize("shape", [(4, 7), (2, 4, 7), (2, 3, 4, 7)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_outputs_changed_in_place(compare: Any, shape: tuple[int, ...], grad: bool) -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w, b.detach()).relu_()
        y = F.linear(y.detach() if not grad else y, w, b)
        y += 1
        y = y @ w
        y[..., 0] = 0
        y.view(-1, 7)[1:].mul_(2)
        y = F.linear(y, w)
        y.flatten()[:3].zero_()
        return y * 1

    outcome = compare(Own(call), [x.detach().requires_grad_(grad) for x in inputs(*shape)])
    assert (outcome.wrong, outcome.deferred) == ([], ["w"])


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_of_convolutions_and_embeddings_changed_in_place(compare: Any, grad: bool) -> None:
    for shape in ((4, 6), (2, 4, 6)):
        layers = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU(True), nn.Conv1d(4, 4, 3), nn.ReLU(True))
        outcome = compare(layers, [x.detach().requires_grad_(grad) for x in inputs(*shape)])
        assert (outcome.wrong, len(outcome.deferred)) == ([], 4)
    outcome = compare(nn.Sequential(nn.Embedding(11, 8), nn.ReLU(True)), tokens())
    assert (outcome.wrong, outcome.deferred) == ([], ["0.weight"])


def test_hooks_of_tensors_come_before_the_split(compare: Any) -> None:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module[0](x)  # type: ignore[index]
        y.register_hook(lambda grad: grad * 3)
        y.relu_()
        y.register_hook(lambda grad: grad + 1)
        y = module[2](y)  # type: ignore[index]
        y.retain_grad()
        return y.mul_(2)

    outcome = compare(mlp(), inputs(4, 8), call)
    assert (outcome.wrong, outcome.deferred) == ([], LINEARS[:2])
