"""Results of any shape: objects are made anew in each call, those that live on are not."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor import static
from vescale_dtensor._static.results import Shape, Shapeless
from vescale_dtensor.errors import StaticWarning

X = torch.arange(3.0)
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    loss: Tensor
    rest: dict[str, Any]


class Cache:
    """As language models return them: objects in a list in an object."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers, self.kind = [Output(tensor, {"n": None})], dict


def test_objects_in_results_are_made_anew() -> None:
    fixed = static(lambda x: Output(x * 2, {"cache": Cache(x + 1), "pair": Pair(x, OrderedDict(z=x - 1)), "name": "n"}))
    before = None
    for step in range(5):
        x = X + step
        out = fixed(x)
        assert type(out) is Output
        assert torch.equal(out.loss, x * 2)
        (layer,) = out.rest["cache"].layers
        assert torch.equal(layer.loss, x + 1)
        assert layer.rest == {"n": None}
        assert out.rest["cache"].kind is dict
        assert out.rest["pair"].a is x
        assert torch.equal(out.rest["pair"].b["z"], x - 1)
        assert out.rest["name"] == "n"
        assert out is not before
        before = out
    assert "def program" in fixed.static_code()


def test_an_object_that_lives_on_stays_dynamic() -> None:
    kept = Output(X, {})

    def returns(x: Tensor) -> Output:
        kept.loss = x * 2
        return kept

    fixed = static(returns)
    first = fixed(X)
    fixed(X)
    with pytest.warns(StaticWarning, match="kept.loss is assigned to"):
        assert fixed(X) is first
    assert all(fixed(X + step) is first for step in range(4))
    assert torch.equal(first.loss, (X + 3) * 2)


def test_what_has_no_shape() -> None:
    class Slotted:
        __slots__ = ("x",)

        def __init__(self, x: Tensor) -> None:
            self.x = x

    for value in (iter([X]), Slotted(X), lambda: X, torch.nn.Linear(2, 2)):
        with pytest.raises(Shapeless, match="it returns a "):
            Shape([X, value])
    assert Shape({"a": [X, (None, X)]}).filled([X, X + 1])["a"][1][1].tolist() == [1.0, 2.0, 3.0]
