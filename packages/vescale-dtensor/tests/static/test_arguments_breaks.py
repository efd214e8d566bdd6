"""What a call is given, and who looks on: tensors that are given twice, containers that it fills, modes and hooks."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from vescale_dtensor import static
from vescale_dtensor.errors import StaticWarning

SHIFT = torch.ones(3)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 10 + self.weight


def test_a_parameter_as_argument_is_not_taken_for_another_argument() -> None:
    fixed, other = static(Adds()), nn.Parameter(torch.full((3,), 2.0))
    for _ in range(2):
        for x, expected in ((fixed.weight, 11.0), (fixed.weight, 11.0), (fixed.weight, 11.0), (other, 21.0)):
            assert fixed(x).tolist() == [expected] * 3
    assert fixed(other).tolist() == fixed(other).tolist() == [21.0] * 3
    assert fixed(fixed.weight).tolist() == [11.0] * 3
    assert fixed.static_code().count("def program") == 2


def test_a_variable_as_argument_is_not_taken_for_it() -> None:
    shift = torch.ones(3)
    functions = {"shift": lambda x: x * 10 + shift, "SHIFT": lambda x: x * 10 + SHIFT}
    for name, variable in (("shift", shift), ("SHIFT", SHIFT)):
        fixed = static(functions[name])
        with pytest.warns(StaticWarning, match=f"its argument is also the variable .*{name}"):
            fixed(variable)
        for _ in range(3):
            assert fixed(variable).tolist() == [11.0] * 3
            assert fixed(variable * 2).tolist() == [21.0] * 3


def test_containers_that_a_call_changes_are_changed_in_every_call() -> None:
    def fills(x: Tensor, where: Any) -> Tensor:
        y = x * 2
        if isinstance(where, dict):
            where["y"] = y
        else:
            where.append(y)
        return y

    def takes(x: dict[str, Tensor]) -> Tensor:
        return x.pop("x") * 2

    for empty in (list, dict):
        fixed = static(fills)
        with pytest.warns(StaticWarning, match="changes a list or dict that it is given"):
            fixed(SHIFT, empty())
        for _ in range(3):
            filled = empty()
            fixed(SHIFT, where=filled)
            assert len(filled) == 1
    fixed = static(takes)
    with pytest.warns(StaticWarning, match="changes a list or dict that it is given"):
        fixed({"x": SHIFT})
    for _ in range(3):
        given = {"x": SHIFT}
        assert fixed(given).tolist() == [2.0] * 3
        assert given == {}


def test_variables_that_are_other_tensors_in_every_call_are_not_kept() -> None:
    held = {"shift": torch.ones(1000)}

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: Tensor) -> Tensor:
            return x * 1

    fixed = static(Holds())
    before = _tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaticWarning)
        for _ in range(40):
            held["shift"] = torch.ones(1000)
            fixed(SHIFT)
    assert _tensors() - before < 5


def _tensors() -> int:
    gc.collect()
    return sum(type(x) is Tensor and x.numel() == 1000 for x in gc.get_objects())


class Counts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_and_hooks_that_must_see_every_call_are_named() -> None:
    fixed = static(Adds())
    with Counts(), pytest.warns(StaticWarning, match=r"under the torch-function mode .*test_arguments_breaks\.Counts"):
        fixed(SHIFT)
    with torch.device("cpu"), pytest.warns(StaticWarning, match=r"torch\.utils\._device\.DeviceContext"):
        fixed(SHIFT)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(StaticWarning, match="hook on all modules"):
            fixed(SHIFT)
    finally:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        around = static(lambda x: fixed(x))
        for _ in range(3):
            around(SHIFT)
            fixed(SHIFT)
    assert "def program" in fixed.static_code()
