"""The store: order, hooks, memory, mistakes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_pipe._wgrad import WeightGradStore
from vescale_pipe._wgrad import store as store_module
from vescale_pipe.errors import PipeError


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def forward(store: WeightGradStore, module: nn.Module, microbatch: int, x: Tensor | None = None) -> Tensor:
    with store.recording(microbatch):
        y: Tensor = module(torch.randn(4, 8) if x is None else x)
    return y


def test_gradients_come_in_w_and_in_its_order() -> None:
    module = mlp()
    plain = copy.deepcopy(module)
    xs = [torch.randn(4, 8) for _ in range(5)]
    for x in xs:
        plain(x).square().sum().backward()
    store = WeightGradStore(module)
    outputs = [forward(store, module, m, x) for m, x in enumerate(xs)]
    for m in range(5):
        with store.backward(m):
            outputs[m].square().sum().backward()
    assert [p.grad is None for p in module.parameters()] == [True, False, True, False, False, False, True, False]
    for m in range(5):
        store.run(m)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


def test_gradients_are_accumulated_in_parts_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = store_module._run_backward

    def counted(*args: Any) -> Any:
        calls.append(len(args[0]))
        return run(*args)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(self.two(self.one(self.two(self.one(x)))))
            return y

    module = Twice()
    plain = copy.deepcopy(module)
    monkeypatch.setattr(store_module, "_run_backward", counted)
    monkeypatch.setattr(store_module, "_AT_ONCE", 1)
    store = WeightGradStore(module)
    for _ in range(2):
        x = torch.randn(4, 8)
        plain(x).sum().backward()
        y = forward(store, module, 0, x)
        with store.backward(0):
            y.sum().backward()
        store.run(0)
    assert calls == [2, 3, 2, 3]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


def test_hooks_of_weights_fire_as_in_a_whole_backward() -> None:
    module = mlp()
    plain = copy.deepcopy(module)
    seen: dict[str, list[Any]] = {"split": [], "plain": []}

    def watch(name: str, net: nn.Module) -> None:
        for key, p in net.named_parameters():
            p.register_hook(lambda grad: grad * 2)
            p.register_hook(lambda grad, key=key: seen[name].append((key, grad.clone())))
            p.register_post_accumulate_grad_hook(lambda p, key=key: seen[name].append((key, p.grad.clone())))

    watch("split", module)
    watch("plain", plain)
    store = WeightGradStore(module)
    for m in range(3):
        x = torch.randn(4, 8)
        plain(x).sum().backward()
        y = forward(store, module, m, x)
        with store.backward(m):
            y.sum().backward()
        waiting = [key for key, _ in seen["split"][-10:]]
        assert not any(key in waiting for key in ("0.weight", "2.weight", "4.weight"))
        store.run(m)
    for key, _ in module.named_parameters():
        mine = [grad for name, grad in seen["split"] if name == key]
        theirs = [grad for name, grad in seen["plain"] if name == key]
        assert len(mine) == len(theirs) == 6
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_an_optimizer_in_the_hook() -> None:
    module = mlp()

    def step(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = [p.detach().clone() for p in module.parameters()]
    store = WeightGradStore(module)
    y = forward(store, module, 0)
    with store.backward(0):
        y.square().sum().backward()
    store.run(0)
    assert all(p.grad is None for p in module.parameters())
    assert all(not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


class Holder(torch.autograd.Function):
    """Doubles, and holds a tensor that autograd does not know of."""

    held: weakref.ref[Tensor] | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.more = x * 3
        Holder.held = weakref.ref(ctx.more)
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


class Hold(nn.Module):
    """`Holder` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return Holder.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_only_inputs_and_gradients_of_outputs_are_kept() -> None:
    module = nn.Sequential(*mlp()[:2], Hold(), *mlp()[2:])
    alive: list[weakref.ref[Tensor]] = []
    storages: dict[str, set[int]] = {"input": set(), "output": set()}

    def watch(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        alive.append(weakref.ref(y))
        if isinstance(layer, nn.Linear):
            storages["input"].add(args[0].untyped_storage().data_ptr())
            y.register_hook(lambda grad: storages["output"].add(grad.untyped_storage().data_ptr()))

    for layer in module:
        layer.register_forward_hook(watch)
    store = WeightGradStore(module)
    y = forward(store, module, 0)
    assert store.pending() == [(0, [])]
    with store.backward(0):
        y.sum().backward()
    del y
    gc.collect()
    assert Holder.held is not None
    assert [one() for one in (*alive, Holder.held)] == [None] * 7
    ((number, tensors),) = store.pending()
    assert (number, len(tensors)) == (0, 6)
    assert all(one.grad_fn is None for one in tensors)
    assert {one.untyped_storage().data_ptr() for one in tensors[::2]} == storages["input"]
    assert {one.untyped_storage().data_ptr() for one in tensors[1::2]} == storages["output"]
    kept = [weakref.ref(one) for one in tensors]
    del tensors
    store.run(0)
    gc.collect()
    assert [one() for one in kept] == [None] * 6


def test_inputs_are_let_go_one_by_one() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    store = WeightGradStore(module)
    y = forward(store, module, 0)
    with store.backward(0):
        y.sum().backward()
    del y
    first = weakref.ref(store.pending()[0][1][0])
    gone = []
    module[1].weight.register_hook(lambda grad: gone.append(first() is None))
    store.run(0)
    assert gone == [True]


class Broken(nn.Module):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)

        def fail(grad: Tensor) -> None:
            raise ValueError("asked to")

        if self.where == "F":
            raise ValueError("asked to")
        if self.where == "I":
            x.register_hook(fail)
        return y


@pytest.mark.parametrize("where", ["F", "I", "W"])
def test_nothing_is_held_after_an_exception(where: str) -> None:
    module = Broken("")
    store = WeightGradStore(module)

    def step(microbatch: int) -> None:
        y = forward(store, module, microbatch, torch.randn(4, 8, requires_grad=True) * 1)
        with store.backward(microbatch):
            y.sum().backward()

    step(0)
    tensors = [weakref.ref(one) for one in store.pending()[0][1]]
    module.where = where

    def fail(grad: Tensor) -> None:
        raise ValueError("asked to")

    handle = module.layer.weight.register_hook(fail)
    if where == "W":
        step(1)
    with pytest.raises(ValueError, match="asked to"):
        store.run(0) if where == "W" else step(1)
    handle.remove()
    gc.collect()
    assert store.pending() == []
    assert [one() for one in tensors] == [None, None]
    module.where = ""
    step(1)
    store.run(1)
    assert module.layer.weight.grad is not None


def test_an_input_changed_in_place_is_an_error() -> None:
    module = nn.Linear(8, 8)
    store = WeightGradStore(module)
    x = torch.randn(4, 8)
    y = forward(store, module, 0, x)
    with store.backward(0):
        y.sum().backward()
    x.add_(1)
    with pytest.raises(PipeError, match=r"micro-batch 0: an input \(shape \(4, 8\)\).*changed in place"):
        store.run(0)
    assert module.weight.grad is None
    assert store.pending() == []


def test_a_weight_changed_before_i_is_an_error_of_autograd() -> None:
    module = nn.Linear(8, 8)
    store = WeightGradStore(module)
    y = forward(store, module, 0, torch.randn(4, 8, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), store.backward(0):
        y.sum().backward()


def test_gradients_taken_inside_a_forward_are_refused() -> None:
    layer = nn.Linear(8, 8)

    class Force(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]

    store = WeightGradStore(layer)
    with pytest.raises(PipeError, match="the forward of a stage calls autograd"):
        forward(store, Force(), 0)
    assert store.pending() == []


def test_a_differentiated_backward_is_refused() -> None:
    layer = nn.Linear(8, 8)
    store = WeightGradStore(layer)
    y = forward(store, layer, 0)
    with pytest.raises(PipeError, match="the backward of a stage is differentiated"), store.backward(0):
        y.sum().backward(create_graph=True)


def test_order_of_calls() -> None:
    layer = nn.Linear(8, 8)
    store = WeightGradStore(layer)
    with pytest.raises(PipeError, match=r"micro-batch 2: nothing is recorded for its weight gradients \(W\)"):
        store.run(2)
    with pytest.raises(PipeError, match=r"micro-batch 2: nothing is recorded for its backward \(I\)"):
        store.backward(2)
    y = forward(store, layer, 2)
    with pytest.raises(PipeError, match="micro-batch 2: its forward is recorded twice"):
        store.recording(2)
    store.run(2)
    with pytest.raises(PipeError, match="I must come before W"):
        y.sum().backward()


def test_clear_forgets() -> None:
    layer = nn.Linear(8, 8)
    store = WeightGradStore(layer)
    y = forward(store, layer, 0)
    with store.backward(0):
        y.sum().backward()
    store.clear()
    assert store.pending() == []
    assert layer.weight.grad is None
    forward(store, layer, 0)


def test_forwards_outside_are_whole() -> None:
    layer = nn.Linear(8, 8)
    store = WeightGradStore(layer)
    forward(store, layer, 0)
    layer(torch.randn(4, 8)).sum().backward()
    assert layer.weight.grad is not None
    assert store.pending() == [(0, [])]


def test_forwards_without_gradients_keep_nothing() -> None:
    layer = nn.Linear(8, 8)
    store = WeightGradStore(layer)
    with torch.no_grad():
        y = forward(store, layer, 0)
    assert not y.requires_grad
    store.run(0)
    assert layer.weight.grad is None


def test_outputs_that_get_no_gradient_add_none() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    store = WeightGradStore(layers)
    x = torch.randn(4, 8)
    with store.recording(0):
        used, _unused = layers[0](x), F.linear(x, layers[1].weight)
    with store.backward(0):
        used.sum().backward()
    store.run(0)
    assert layers[0].weight.grad is not None
    assert layers[1].weight.grad is None
