"""Which modules become units, and who owns which parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_comm._fsdp.choose import assign, choose_units
from vescale_comm.errors import PlanError


class Gpt(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def names(root: nn.Module, units: object = "auto") -> list[str]:
    return list(choose_units(root, units))


def test_blocks_and_what_is_as_large() -> None:
    assert names(Gpt()) == ["", "tokens", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_what_is_shared_is_no_unit_by_itself() -> None:
    assert names(Gpt(tied=True)) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_members_of_a_root_that_is_a_container() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["", "0", "2"]


def test_members_of_members_are_not_units() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert names(nn.Sequential(nn.Sequential(inner, nn.Linear(2, 2)))) == ["", "0.0", "0.1"]


def test_containers_that_are_never_called_are_no_units() -> None:
    grid = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "b": nn.Linear(2, 2)})
    assert names(nn.ModuleDict({"grid": grid})) == ["", "grid.a.0", "grid.a.1", "grid.b"]


def test_names_and_classes() -> None:
    assert names(Gpt(), ["blocks.1", nn.Embedding]) == ["", "tokens", "places", "blocks.1"]
    assert names(Gpt(), []) == [""]
    with pytest.raises(PlanError, match="names are such as"):
        names(Gpt(), ["blocks.3"])


def owners(root: nn.Module, units: object) -> dict[str, list[str]]:
    chosen = choose_units(root, units)
    owned, _ = assign(root, chosen)
    return {unit: [entry.name for entry in entries] for unit, entries in zip(chosen, owned, strict=True)}


def test_a_parameter_belongs_to_the_innermost_unit() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert owners(model, ["0", "0.1"]) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.0.weight", "0.0.bias"],
        "0.1": ["0.1.weight", "0.1.bias"],
    }


def test_a_shared_parameter_has_one_owner_around_all_uses() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0][1].weight = model[0][0].weight
    units = ["0", "0.0", "0.1", "1"]
    assert owners(model, units)["0"] == ["0.0.weight"]
    model[1].weight = model[0][0].weight
    assert owners(model, units)[""] == ["0.0.weight"]
    assert owners(model, units)["0"] == []
    entry = assign(model, choose_units(model, units))[0][0][0]
    assert [use.module for use in entry.uses] == [model[0][0], model[0][1], model[1]]


def test_a_shared_module_is_one() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert names(model) == [""]
    model.append(nn.Linear(2, 2))
    assert names(model) == ["", "0", "3"]
    assert owners(model, "auto")["0"] == ["0.weight", "0.bias"]


def test_lazy_modules_are_refused() -> None:
    with torch.no_grad():
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    with pytest.raises(PlanError, match="no shape yet"):
        owners(model, [])
