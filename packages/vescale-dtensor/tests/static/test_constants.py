"""Objects in two records of the same text: which of them are the same."""

from __future__ import annotations

import enum
import functools
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor._static.constants import differs


class Color(enum.Enum):
    RED = 1


LAYER = nn.ReLU()
SAME: list[tuple[Any, Any]] = [
    (torch.ones(2), torch.ones(2)),
    (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
    (float("nan"), float("nan")),
    (Color.RED, Color.RED),
    (LAYER.forward, LAYER.forward),
    (torch.add, torch.add),
    ("a", "a"),
]
OTHER: list[tuple[Any, Any]] = [
    (torch.ones(2), torch.zeros(2)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (0.0, -0.0),
    (1, 1.0),
    (LAYER.forward, nn.ReLU().forward),
    (lambda: 1, lambda: 1),
    (functools.partial(max, 1), functools.partial(max, 1)),
    ([1], [2]),
    (object(), object()),
]


@pytest.mark.parametrize("pair", SAME)
def test_the_same(pair: tuple[Any, Any]) -> None:
    assert differs({"c0": pair[0], "__builtins__": 1}, {"c0": pair[1], "__builtins__": 2}) is None


@pytest.mark.parametrize("pair", OTHER)
def test_others_are_named(pair: tuple[Any, Any]) -> None:
    assert differs({"a": 1, "c0": pair[0]}, {"a": 1, "c0": pair[1]}) == "c0"


def test_arrays_of_numpy_are_told_apart_by_which_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    assert differs({"c0": numpy.ones(2)}, {"c0": numpy.ones(2)}) == "c0"
    assert differs({"c0": numpy.float64(1)}, {"c0": numpy.float64(2)}) == "c0"
    assert differs({"c0": numpy.float64(2)}, {"c0": numpy.float64(2)}) is None
