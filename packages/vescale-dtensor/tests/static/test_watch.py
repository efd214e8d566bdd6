"""What a step does below the functions that Python sees."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from vescale_dtensor import static
from vescale_dtensor._static.watch import Watch
from vescale_dtensor.errors import StaticWarning

X = torch.arange(6.0).view(2, 3)


@torch.library.custom_op("vescale_static_tests::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def _bumped(x: Tensor) -> Tensor:
    y = x * 2
    torch.ops.vescale_static_tests.bump(y)
    Doubles.apply(y)
    return y


def test_writes_of_custom_operators_and_functions_are_repeated() -> None:
    fixed = static(_bumped)
    for step in range(4):
        assert torch.equal(fixed(X + step), ((X + step) * 2 + 1) * 2)
    assert "bump(" in fixed.static_code()


def test_gradients_off_at_the_start_stay_off_there() -> None:
    def half(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 1
        return (x * y).sum()

    fixed = static(half)
    for _ in range(4):
        x = X.clone().requires_grad_()
        fixed(x).backward()
        assert torch.equal(x.grad, X)


CASES: dict[str, tuple[Callable[..., Tensor], list[Any], str]] = {
    "arange": (lambda n: torch.arange(n) * 1, [torch.tensor(2), torch.tensor(4)], "arange reads a value"),
    "slice": (lambda n: X[:, :n] * X[:, :n].size(1), [torch.tensor(2), torch.tensor(3)], "__getitem__ reads a value"),
    "one_hot": (lambda n: F.one_hot(n).sum(0), [torch.tensor([0, 1]), torch.tensor([2, 0])], "one_hot reads a value"),
    "bincount": (lambda n: torch.bincount(n) * 2, [torch.tensor([1]), torch.tensor([4])], "bincount reads a value"),
    "tensor_split": (
        lambda n: torch.tensor_split(X, n, dim=1)[0] * 1,
        [torch.tensor([1]), torch.tensor([2])],
        "tensor_split returns depends",
    ),
    "grad_fn": (lambda x: x * (2 if x.grad_fn is None else 3), [X, X + 1], "grad_fn of a tensor is read"),
    "grad": (lambda x: x * (2 if x.grad is None else 3), [X, X + 1], "grad of a tensor is read"),
}


@pytest.mark.parametrize("name", CASES)
def test_values_that_are_read_on_the_quiet_are_found(name: str) -> None:
    function, arguments, reason = CASES[name]
    fixed = static(function)
    with pytest.warns(StaticWarning, match=rf"{reason}.*test_watch.py:\d+"):
        fixed(arguments[0])
    for argument in arguments * 2:
        assert torch.equal(fixed(argument), function(argument))


def test_numbers_in_tensors_that_change_no_shape_are_no_reason() -> None:
    fixed = static(lambda x, n: torch.full((2,), n) + x[n.long()].sum() + x.masked_fill(x > 4, n).sum())
    for n in (0.0, 1.0, 1.0, 0.0, 1.0):
        number = torch.tensor(n)
        expected = torch.full((2,), n) + X[int(n)].sum() + X.masked_fill(X > 4, n).sum()
        assert torch.equal(fixed(X, number), expected)
    assert "def program" in fixed.static_code()


class Loud(Tensor):
    """A class of tensors whose multiplication is another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 100 if func is Tensor.mul else result


def test_tensors_with_operators_of_their_own_stay_dynamic() -> None:
    fixed = static(lambda x: x.mul(2))
    with pytest.warns(StaticWarning, match="a tensor of type Loud, which has operators of its own"):
        fixed(torch.ones(2).as_subclass(Loud))
    for _ in range(3):
        assert fixed(torch.ones(2).as_subclass(Loud)).tolist() == [102.0, 102.0]

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.ones(2).as_subclass(Loud)

        def forward(self, x: Tensor) -> Tensor:
            return self.factor.mul(x).as_subclass(Tensor)

    module = static(Holds())
    with pytest.warns(StaticWarning, match="a tensor of type Loud"):
        module(torch.ones(2))
    for _ in range(3):
        assert module(torch.ones(2)).tolist() == [101.0, 101.0]


def test_transforms_fake_tensors_and_global_hooks_see_every_call() -> None:
    from torch._subclasses import FakeTensorMode

    fixed = static(lambda x: (x * torch.arange(3.0)).square().sum())
    module = static(nn.Sequential(nn.ReLU(), nn.ReLU()))
    for _ in range(4):
        assert torch.equal(torch.func.grad(fixed)(X), 2 * X * torch.arange(3.0).square())
        assert torch.equal(torch.vmap(fixed)(X), (X * torch.arange(3.0)).square().sum(1))
        with FakeTensorMode():
            assert fixed(torch.ones(2, 3)).shape == ()
        assert fixed(X) == (X * torch.arange(3.0)).square().sum()
        module(X)
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, args, result: seen.append(type(module).__name__))
    try:
        with pytest.warns(StaticWarning, match="hook on all modules"):
            module(X)
        for _ in range(2):
            module(X)
    finally:
        handle.remove()
    assert seen == ["ReLU", "ReLU", "Sequential"] * 3


def test_hooks_of_a_module_that_a_function_calls() -> None:
    layer, seen = nn.ReLU(), []
    fixed = static(lambda x: layer(x) + 1)
    for _ in range(3):
        fixed(X)
    layer.register_forward_pre_hook(lambda module, args: seen.append(1))
    with pytest.warns(StaticWarning, match="ReLU inside has hooks"):
        fixed(X)
    for _ in range(2):
        fixed(X)
    assert len(seen) == 3


def test_what_another_thread_does_is_no_part_of_a_record() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    fixed = static(nn.Sequential(*layer))
    wrong: list[tuple[int, int]] = []

    def call(number: int) -> None:
        for step in range(30):
            x = torch.full((1 + step % 3, 3), float(number + step))
            if not torch.equal(fixed(x), layer(x)):
                wrong.append((number, step))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fixed.static_code().count("def program") == 3


def test_a_hook_that_is_made_anew_in_every_call_is_not_repeated() -> None:
    def hooked(x: Tensor, k: Tensor) -> Tensor:
        y = x * 1
        factor = k * 3
        y.register_hook(lambda grad: grad * factor)
        return y.sum()

    fixed = static(hooked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(5):
            x = X.clone().requires_grad_()
            fixed(x, torch.tensor(float(k))).backward()
            assert torch.equal(x.grad, torch.full((2, 3), 3.0 * k))
    assert [str(w.message) for w in caught if "was another object" in str(w.message)]


def test_attention_draws_only_where_it_drops() -> None:
    x = torch.randn(1, 2, 3, 4)
    for asked, draws in ({}, False), ({"dropout_p": 0.0}, False), ({"dropout_p": 0.5}, True):
        watch = Watch(lambda *_: None)
        with watch:
            watch.begin()
            F.scaled_dot_product_attention(x, x, x, **asked)
            assert watch.end().draws == draws
