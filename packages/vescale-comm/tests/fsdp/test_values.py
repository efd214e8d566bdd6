"""Tensors are found and converted in whatever modules take and return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from vescale_comm._fsdp.values import cast, hidden_tensors, tensors_in

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Record:
    value: Tensor
    more: list[Any]


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_tensors_in_containers_and_objects() -> None:
    a, b, c, d, e = (torch.tensor(number) for number in range(5))
    value = [Pair(a, {"x": b}), Record(c, [Thing(d), "text", 3, None]), OrderedDict(y=(e,))]
    assert [int(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3, 4]


def test_cycles_modules_and_depth() -> None:
    thing = Thing(None)
    thing.value = [thing, torch.tensor(1)]
    assert [int(tensor) for tensor in tensors_in(thing)] == [1]
    assert list(tensors_in([nn.Linear(2, 2), Tensor])) == []
    nested: Any = torch.tensor(1)
    for _ in range(20):
        nested = [nested]
    assert list(tensors_in(nested)) == []


def test_results_in_attributes_are_told_once() -> None:
    module = nn.Linear(2, 2)
    module.loss = module(torch.ones(2)).sum()
    module.constant = torch.ones(2)
    assert [tensor is module.loss for tensor in hidden_tensors(module)] == [True]
    assert list(hidden_tensors(module)) == []
    module.loss = module(torch.ones(2)).sum()
    assert len(list(hidden_tensors(module))) == 1


def test_floating_point_tensors_are_converted() -> None:
    x, n = torch.ones(2), torch.tensor([1])
    got = cast((Pair(x, n), [x], {"x": x}, "text", Thing(x)), torch.bfloat16)
    assert got[0].a.dtype == got[1][0].dtype == got[2]["x"].dtype == torch.bfloat16
    assert isinstance(got[0], Pair)
    assert got[0].b is n
    assert got[4].value is x
