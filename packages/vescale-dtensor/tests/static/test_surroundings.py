"""A program is not repeated once what its functions read is another: attributes, closures, globals, configurations."""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import static
from vescale_dtensor._static.surroundings import Surroundings
from vescale_dtensor.errors import StaticWarning

X = torch.arange(6.0).view(2, 3)
FACTOR = 1.0


class Config:
    def __init__(self) -> None:
        self.shift, self.deep = 2.0, {"list": [1.0, [2.0]]}


class Reads(nn.Module):
    """Reads a number from wherever there may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.config, self.table = 2.0, Config(), {"a": 1}
        self.space = types.SimpleNamespace(more=1.0)

    def helper(self, x: Tensor) -> Tensor:
        return x * FACTOR

    def forward(self, x: Tensor) -> Tensor:
        deep = self.config.deep["list"]
        y = x * self.scale + self.config.shift + deep[0] * deep[1][0]
        return self.helper(y) + self.table["a"] + _factor() + self.space.more


def _factor() -> float:
    return FACTOR


def set_global(_: nn.Module) -> None:
    global FACTOR
    FACTOR = 5.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "configuration": lambda m: setattr(m.config, "shift", 3.0),
    "list": lambda m: m.config.deep["list"].__setitem__(0, 3.0),
    "list in a list": lambda m: m.config.deep["list"][1].__setitem__(0, 3.0),
    "dict": lambda m: m.table.update(a=7),
    "namespace": lambda m: setattr(m.space, "more", 9.0),
    "another configuration": lambda m: setattr(m, "config", Config()) or setattr(m.config, "shift", 8.0),
    "global": set_global,
}


@pytest.fixture(autouse=True)
def _one_factor() -> Iterator[None]:
    global FACTOR
    yield
    FACTOR = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_is_seen(name: str) -> None:
    plain, fixed = Reads(), static(Reads())
    for _ in range(3):
        assert torch.equal(plain(X), fixed(X))
    assert fixed.static_code().count("def program") == 1
    before = plain(X)
    for module in (plain, fixed):
        CHANGES[name](module)
    for _ in range(3):
        assert torch.equal(plain(X), fixed(X))
    assert not torch.equal(plain(X), before)
    assert fixed.static_code().count("def program") == 2


def test_closures_and_dropout() -> None:
    factor = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    fixed = static(scaled)
    assert [fixed(X).sum().item() for _ in range(3)] == [30.0] * 3
    factor = 3.0
    assert [fixed(X).sum().item() for _ in range(3)] == [45.0] * 3
    plain, drops = (nn.Sequential(nn.Dropout(0.1), nn.ReLU()) for _ in range(2))
    static(drops)
    for p in (0.1, 0.9, 0.1):
        for call in range(3):
            found = []
            for module in (plain, drops):
                module[0].p = p
                torch.manual_seed(call)
                found.append(module(X))
            assert torch.equal(*found)
    assert drops.static_code().count("def program") == 2


def test_a_value_of_another_type_or_sign_is_another() -> None:
    class Scales(nn.Module):
        scale: complex = 1

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = static(Scales())
    for scale in (2, 2.0, True, 1, 0.0, -0.0):
        module.scale = scale
        for _ in range(3):
            found, expected = module(X.long()), X.long() * scale
            assert found.dtype == expected.dtype
            assert torch.equal(1 / found, 1 / expected)
    fixed = static(lambda x, k: 1 / (x * k))
    for k in (0.0, -0.0, 0.0):
        for _ in range(3):
            assert torch.equal(fixed(X + 1, k), 1 / ((X + 1) * k))


def told(function: Callable[[], object]) -> list[str]:
    """Messages of `static` while a function runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]


class Assigns(nn.Module):
    """Changes something of itself in each call, by the name of it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.what, self.log, self.count, self.first = what, [], 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "mean":
            self.mean = self.mean * 0.5 + x.mean(0)
        if self.what == "log":
            self.log.append(x.sum())
        if self.what == "count":
            self.count += 1
        if self.what == "first" and self.first is None:
            self.first = torch.arange(3)
        return x - self.mean + self.count + (0 if self.first is None else self.first)


@pytest.mark.parametrize("what", ["mean", "log", "count"])
def test_what_is_assigned_in_every_call_goes_on_to_be(what: str) -> None:
    plain, fixed = Assigns(what), static(Assigns(what))

    def run() -> None:
        for _ in range(5):
            assert torch.equal(plain(X), fixed(X))

    assert told(run) == [f"static: Assigns runs dynamically: Assigns.{what} is assigned to."]
    assert (len(plain.log), plain.count) == (len(fixed.log), fixed.count)


def test_what_is_assigned_in_the_first_call_only_does_no_harm() -> None:
    plain, fixed = Assigns("first"), static(Assigns("first"))

    def run() -> None:
        for _ in range(4):
            assert torch.equal(plain(X), fixed(X))

    assert told(run) == []
    assert "def program" in fixed.static_code()


def test_draws_of_python_and_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    for draw in (random.random, numpy.random.rand):
        fixed = static(lambda x, draw=draw: x * (draw() < 2))
        (message,) = told(lambda fixed=fixed: [fixed(X) for _ in range(3)])
        assert "draws random numbers from Python or NumPy" in message


def test_a_value_that_changes_all_the_time_is_named() -> None:
    module = static(Reads(), limit=4)

    def run() -> None:
        for step in range(6):
            module.scale = float(step)
            module(X)

    (message,) = told(run)
    assert "called with 4 kinds of arguments" in message
    assert "leave Reads.scale, which changed last" in message


def test_large_containers_are_looked_at_by_their_size() -> None:
    module = nn.Identity()
    module.words = {str(n): n for n in range(1000)}
    around = Surroundings([module], [])
    values, sizes = around.values(), around.sizes()
    assert len(values) < 20
    module.words["1"] = 2
    assert around.same(values, sizes)
    module.words["new"] = 2
    assert not around.same(values, sizes)
    assert around.changed(values, sizes) == "Identity.words"
