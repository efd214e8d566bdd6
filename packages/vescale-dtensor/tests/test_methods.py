"""Overridden methods give what the function gives, however they are reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor, _methods, distribute_tensor
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements

UNARY = _methods._UNARY.split()
BINARY = _methods._BINARY.split()


def _positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    x = _positive(6, 5) > 1 if name == "__invert__" else _positive(6, 5)
    for codes in ("S0 S1", "I S0", "P I" if x.is_floating_point() else "I I"):
        for _ in range(2):  # the second call finds the entry
            check_op(getattr(Tensor, name), [x], [codes], cached_mesh(2, 2))
            check_op(lambda t: getattr(t, name)(), [x], [codes], cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    x = _positive(6, 5) > 1 if name in ("__and__", "__or__") else _positive(6, 5)
    for other, codes in ((x, ["S0 S1", "S0 I"]), (x, ["S0 S0", "I S1"]), (x[0], ["S0 S1", "I R"])):
        for _ in range(2):
            check_op(lambda a, b: getattr(a, name)(b), [x, other], codes, cached_mesh(2, 2))
    if x.is_floating_point() and name not in ("maximum", "minimum"):
        for scalar in (2, 1.5):
            for _ in range(2):
                check_op(lambda a: getattr(a, name)(scalar), [x], ["S0 P"], cached_mesh(2, 2))  # noqa: B023


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("view", (3, 2, 4)), ("view", ([6, 4],)), ("reshape", (24,)), ("transpose", (0, 1)), ("permute", (1, 0)),
        ("flatten", ()), ("unsqueeze", (1,)), ("sum", ()), ("sum", (1,)), ("sum", (-1, True)), ("mean", (0,)),
        ("softmax", (-1,)), ("log_softmax", (-1,)), ("chunk", (2, 1)), ("split", (2,)), ("unbind", ()),
        ("expand", (2, 6, 4)),
        ("to", (torch.float32,)), ("float", ()), ("amax", (1,)), ("argmax", (1,)), ("cumsum", (0,)),
    ],
)  # fmt: skip
def test_keyed(name: str, args: tuple[Any, ...]) -> None:
    tolerance = 1e-6 if name in ("to", "float") else 1e-10
    for codes in ("S0 I", "S1 I", "I R"):
        for _ in range(2):
            check_op(
                lambda x: getattr(x, name)(*args), [_positive(6, 4)], [codes], cached_mesh(2, 2),
                rtol=tolerance, atol=tolerance,
            )  # fmt: skip


@pytest.mark.ranks(4, pool=True)
def test_function_modes_still_see_the_call() -> None:
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = distribute_tensor(_positive(4, 4), cached_mesh(4), placements("S0"))
    x.relu(), x + x, x.view(16)
    with Watch():
        x.relu(), x + x, x.view(16)
    assert {"relu", "view"} <= set(seen)
    assert {"add", "__add__"} & set(seen)


@pytest.mark.ranks(4, pool=True)
def test_with_dispatch_off_a_dtensor_is_its_local_part() -> None:
    x = distribute_tensor(_positive(8, 3), cached_mesh(4), placements("S0"))
    with torch._C.DisableTorchFunctionSubclass():
        y = x + x
        assert type(y) is Tensor
        assert y.shape == x.shape == x.size() == (2, 3)
        assert x.numel() == 6
        assert len(x) == 2
        assert x.stride() == (3, 1)
    assert x.shape == (8, 3)
    assert isinstance(x + x, DTensor)
