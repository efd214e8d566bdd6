"""When a backward begins and ends, with and without backwards inside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm._gradients.backward import NO_TASK, BackwardWatch, current_task


class Log:
    """Watches parameters, and writes down what happens."""

    def __init__(self, *params: nn.Parameter) -> None:
        self.events: list[str] = []
        say = self.events.append
        self.watch = BackwardWatch(lambda: say("begin"), lambda: say("end"), lambda: say("broken"))
        for number, param in enumerate(params):
            param.register_post_accumulate_grad_hook(lambda _, number=number: self.fired(number))

    def fired(self, number: int) -> None:
        if current_task() != self.watch.task:
            self.watch.enter(current_task())
        self.events.append(f"{'nested ' if self.watch.nested else ''}{number}")


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def test_a_plain_backward() -> None:
    a, b = weight(), weight()
    log = Log(a, b)
    for _ in range(2):
        (a * 2 + b).sum().backward()
    once = ["begin", *log.events[1:3], "end"]
    assert sorted(once[1:3]) == ["0", "1"]
    assert log.events == once * 2
    assert log.watch.outer == NO_TASK
    assert current_task() == NO_TASK


@pytest.mark.parametrize("outside", [False, True])
def test_a_reentrant_checkpoint_is_part_of_the_backward_around_it(outside: bool) -> None:
    """Also where no parameter is used outside of the checkpoints, so that no hook fires in the outer backward."""
    a, b = weight(), weight()
    log = Log(a, b)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        log.events.clear()
        y = x * b if outside else x * 3
        for _ in range(2):
            y = checkpoint(lambda y: y * a, y, use_reentrant=True)
        y.sum().backward()
        assert log.events.count("nested 0") == 2
        assert log.events.count("begin") == log.events.count("end") == 1
        assert log.events[-1] == "end"
        assert ("1" in log.events) is outside


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_inside_checkpoints() -> None:
    a = weight()
    log = Log(a)

    def inner(y: Tensor) -> Tensor:
        return y * a

    def middle(y: Tensor) -> Tensor:
        return checkpoint(inner, y * a, use_reentrant=True)

    y: Any = checkpoint(middle, torch.ones(2, requires_grad=True) * 2, use_reentrant=True)
    y.sum().backward()
    assert log.events.count("nested 0") == 2
    assert log.events[-1] == "end"
    assert log.events.count("end") == 1


def test_other_checkpoints_run_no_backward_inside() -> None:
    a = weight()
    log = Log(a)
    y: Any = checkpoint(lambda y: y * a, torch.ones(2), use_reentrant=False)
    y.sum().backward()
    assert log.events == ["begin", "0", "end"]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def test_a_backward_that_raises_is_broken_when_the_next_one_begins() -> None:
    a, b = weight(), weight()
    log = Log(a, b)
    with pytest.raises(ValueError, match="no gradient today"):
        (Fails.apply(torch.ones(2) * a) * b).sum().backward()
    assert log.watch.left
    assert log.events == ["begin", "1"]
    (a * b).sum().backward()
    assert not log.watch.left
    assert log.events[2:4] == ["broken", "begin"]
    assert log.events[-1] == "end"


def test_what_the_end_raises_comes_out_of_backward() -> None:
    a = weight()

    def fail() -> None:
        raise ValueError("at the end")

    watch = BackwardWatch(lambda: None, fail, lambda: None)
    a.register_post_accumulate_grad_hook(lambda _: watch.enter(current_task()))
    with pytest.raises(ValueError, match="at the end"):
        a.sum().backward()
    assert not watch.left
