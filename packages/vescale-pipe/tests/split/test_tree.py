"""Nested values: rebuilt with new leaves, reached by paths, filled from templates."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from vescale_pipe._split.tree import Leaf, Slot, fill, leaves, mapped, pick

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any
    other: int = 7


@dataclasses.dataclass
class Opaque(Leaf):
    inner: Any


class Output(OrderedDict):  # as Hugging Face's: a dict with fields
    pass


VALUES = [
    1,
    (1, [2, {"a": 3}]),
    Pair(1, (2,)),
    {"b": 1, "a": Pair(2, None)},
    Frozen([1, 2]),
    Output(x=1, y=[2]),
    torch.return_types.max((torch.tensor(1), torch.tensor(2))),
    slice(1, None, 2),
    [torch.Size([2, 3])],
    "text",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_paths_and_templates(value: Any) -> None:
    found: list[Any] = []

    def leaf(item: Any, path: Any) -> Any:
        assert pick(value, path) is item
        found.append(item)
        return Slot(len(found) - 1)

    template = mapped(leaf, value)
    assert found == leaves(value)
    again = fill(template, found)
    assert type(again) is type(value)
    assert again == value
    assert mapped(lambda item, path: item, value) is value


def test_leaves_are_not_looked_into() -> None:
    opaque = Opaque([1])
    assert leaves((opaque, None, torch.Size([1]))) == [opaque, None, torch.Size([1])]


def test_a_registered_type() -> None:
    from collections import deque

    value = deque([1, deque([2])])
    assert leaves(value) == [1, 2]
    assert mapped(lambda item, path: item + pick(value, path), value) == deque([2, deque([4])])
