"""Wrong names and impossible cuts are errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._split import split
from vescale_pipe.errors import SplitError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.unused = nn.Linear(4, 4)
        self.positions = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shift = self.positions(torch.arange(4.0))
        for layer in self.layers:
            x = layer(x) + shift
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": ["encoder.layer.3"]}, r"at='encoder.layer.3': Outer has no such module. Nearest modules: 'encoder.l"),
        ({"at": ["encoder.unused"]}, r"at='encoder.unused': this module is not called in the forward"),
        ({"at": ["encoder"]}, r"at='encoder': nothing happens between the beginning of the model and this module"),
        ({"at": ["encoder.layers.0"]}, r"at='encoder.layers.0': stage 0 would be empty"),
        ({"at": ["encoder.layers.2", "encoder.layers.2"]}, r"nothing happens between at='encoder.layers.2'"),
        (
            {"at": ["encoder.layers.2"], "units": [Inner]},
            r"at='encoder.layers.2': it lies inside 'encoder', which `units`",
        ),
        ({"at": ["head"], "units": ["hed"]}, r"units='hed': Outer has no such module. Nearest modules: 'head'"),
        ({"at": ["head"], "units": [nn.Conv2d]}, r"units: Outer holds no module of class Conv2d"),
        ({"num_stages": 9}, r"num_stages=9: Outer has only 5 modules to divide \(encoder.layers.0, "),
        ({"num_stages": 0}, r"num_stages is 0"),
        ({"num_stages": 2, "at": ["head"]}, r"either at=.* or num_stages="),
        ({}, r"either at=.* or num_stages="),
        ({"num_stages": 2, "costs": [1.0]}, r"costs: 1 numbers for 5 units, which are encoder.layers.0, "),
        ({"num_stages": 2, "costs": {"headd": 1.0}}, r"costs: no unit is called 'headd'. Nearest names: 'head'"),
        ({"num_stages": 2, "costs": "time"}, r"costs is 'time'"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split(Outer(), example_args=(torch.randn(2, 4),), **options)


def test_a_cut_at_an_opened_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Outer(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    graph = split(model, at=["1", "1.encoder.layers.2", "2"], example_args=(x,))
    assert [unit.stage for unit in graph.units] == [0, 1, 1, 2, 2, 2, 3]
    assert torch.equal(graph.run(x), model(x))


def test_only_what_contains_a_cut_is_opened() -> None:
    graph = split(Outer(), at=["head"], example_args=(torch.randn(2, 4),))
    assert [unit.name for unit in graph.units] == ["encoder", "head"]
