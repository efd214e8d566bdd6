"""One stage at work, without ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._runtime.losses import add_loss
from vescale_pipe._runtime.stage import Edge, StageRunner
from vescale_pipe._runtime.wiring import StageWiring
from vescale_pipe.errors import PipeError


class Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> tuple[Any, ...]:
        return (self.inner(*args),)


def middle(module: nn.Module, split: bool = False) -> tuple[StageRunner, Edge, Edge]:
    """A stage between two others."""
    before, after = Edge(False, True), Edge(False, True)
    wiring = StageWiring(((0, ((0, 0),)),), ((2, (0,)),), (0,))
    runner = StageRunner(1, module, wiring, [before], [after], None)
    runner.modules = [module] * 4
    if split:
        runner.split()
    return runner, before, after


def test_values_and_gradients_go_through() -> None:
    lin = nn.Linear(3, 2)
    runner, before, after = middle(Tuple(lin))
    x = torch.randn(4, 3, requires_grad=True)
    dy = torch.randn(4, 2)
    before.values[0] = [x.detach().requires_grad_()]
    runner.forward(0)
    (y,) = after.values.pop(0)
    want = lin(x)
    assert torch.equal(y, want)
    after.grads[0] = [dy]
    runner.backward(0)
    got_weight = lin.weight.grad
    lin.weight.grad = None
    want.backward(dy)
    assert torch.equal(before.grads.pop(0)[0], x.grad)
    assert torch.equal(got_weight, lin.weight.grad)
    assert not before.values
    assert not after.grads


def test_gradients_of_weights_wait_for_their_half() -> None:
    lin = nn.Linear(3, 2)
    runner, before, after = middle(Tuple(lin), split=True)
    x, dy = torch.randn(4, 3), torch.randn(4, 2)
    before.values[0] = [x.clone().requires_grad_()]
    runner.forward_split(0)
    after.values.pop(0)
    after.grads[0] = [dy]
    runner.input_backward(0)
    assert lin.weight.grad is None
    assert torch.equal(before.grads.pop(0)[0], dy @ lin.weight)
    runner.weight_backward(0)
    assert torch.equal(lin.weight.grad, dy.t() @ x)


def test_without_a_gradient_there_is_no_backward() -> None:
    lin = nn.Linear(3, 2)
    runner, before, after = middle(Tuple(lin))
    before.values[0] = [torch.randn(4, 3).requires_grad_()]
    runner.forward(0)
    after.values.pop(0)
    after.grads[0] = [None]
    runner.backward(0)
    assert before.grads.pop(0) == [None]
    assert lin.weight.grad is None


def test_nothing_of_a_micro_batch_stays() -> None:
    lin = nn.Linear(3, 2)
    runner, before, after = middle(Tuple(lin))
    x = torch.randn(4, 3).requires_grad_()
    before.values[0] = [x]
    runner.forward(0)
    watched = [weakref.ref(x), weakref.ref(after.values.pop(0)[0])]
    after.grads[0] = [torch.ones(4, 2)]
    runner.backward(0)
    before.grads.clear()
    del x
    gc.collect()
    assert [one() for one in watched] == [None, None]
    before.values[1] = [torch.randn(4, 3)]
    runner.forward_only(1)
    watched = [weakref.ref(after.values.pop(1)[0])]
    gc.collect()
    assert watched[0]() is None


def test_forget_drops_what_a_failure_left() -> None:
    lin = nn.Linear(3, 2)
    runner, before, after = middle(Tuple(lin), split=True)
    kept = runner.capture("inner.weight", lin.weight)
    for m in range(2):
        before.values[m] = [torch.randn(4, 3).requires_grad_()]
        runner.forward_split(m)
    after.grads[0] = [torch.ones(4, 2)]
    runner.input_backward(0)
    runner.forget()
    assert not before.grads
    assert not after.values
    assert not kept
    before.values[0] = [torch.randn(4, 3).requires_grad_()]
    runner.forward_split(0)  # not "recorded twice"


def test_captured_gradients_stay_apart() -> None:
    lin = nn.Linear(3, 2, bias=False)
    for split in (False, True):
        runner, before, after = middle(Tuple(lin), split)
        lin.weight.grad = old = torch.full((2, 3), 5.0)
        kept = runner.capture("inner.weight", lin.weight)
        inputs = [torch.randn(4, 3) for _ in range(2)]
        for m, x in enumerate(inputs):
            before.values[m] = [x.clone().requires_grad_()]
            (runner.forward_split if split else runner.forward)(m)
            after.grads[m] = [torch.ones(4, 2)]
            (runner.input_backward if split else runner.backward)(m)
            if split:
                runner.weight_backward(m)
        assert lin.weight.grad is old
        assert bool((old == 5.0).all())
        assert [torch.equal(kept[m], torch.ones(4, 2).t() @ x) for m, x in enumerate(inputs)] == [True, True]


def test_an_error_in_a_captured_backward_restores_gradients() -> None:
    lin = nn.Linear(3, 2, bias=False)
    runner, before, after = middle(Tuple(lin))
    lin.weight.grad = old = torch.zeros(2, 3)
    runner.capture("inner.weight", lin.weight)
    before.values[0] = [torch.randn(4, 3).requires_grad_()]
    runner.forward(0)
    after.grads[0] = [torch.ones(9)]
    with pytest.raises(RuntimeError):
        runner.backward(0)
    assert lin.weight.grad is old


def test_local_values_share_memory_and_no_graph() -> None:
    lin = nn.Linear(3, 2)
    before, after = Edge(False, True), Edge(True, True)
    wiring = StageWiring(((0, ((0, 0),)),), ((2, (0,)),), (0,))
    runner = StageRunner(1, lin, wiring, [before], [after], None)
    runner.modules = [Tuple(lin)]
    before.values[0] = [torch.randn(4, 3)]
    runner.forward(0)
    (y,) = after.values[0]
    assert y.is_leaf
    assert y.requires_grad


def test_losses_of_an_unfinished_forward_do_not_leak() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            add_loss(x.sum())
            raise ValueError("bad")

    runner, before, _ = middle(Tuple(Bad()))
    before.values[0] = [torch.randn(4, 3)]
    with pytest.raises(ValueError, match="bad"):
        runner.forward(0)
    add_loss(torch.zeros(()))  # no forward runs
    runner.forget()
    runner.modules = [Tuple(nn.Identity())]
    before.values[0] = [torch.randn(4, 3)]
    runner.forward(0)  # without "a module called add_loss"
    runner.modules = [Tuple(nn.Identity()), nn.Identity()]
    before.values[1] = [torch.randn(4, 3)]
    with pytest.raises(PipeError, match="it must return a tuple"):
        runner.forward(1)
