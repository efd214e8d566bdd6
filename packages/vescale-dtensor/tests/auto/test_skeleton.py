"""Skeletons: repeated layers stand once, names stand for all of them, the model itself is not touched."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import PlanError
from vescale_dtensor._auto.skeleton import skeleton


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Stack(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(w) for w in widths)
        self.head = nn.Linear(8, 3)
        self.scale = torch.ones(3)  # a plain tensor beside parameters and buffers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def names(module: nn.Module) -> set[str]:
    return {n for n, _ in module.named_parameters()}


@pytest.mark.parametrize(
    ("widths", "kept", "weight"),
    [((8, 8, 8, 8), {"0"}, {"layers.0": 4}), ((8, 16, 16, 16), {"0", "1"}, {"layers.1": 3}), ((8, 16), {"0", "1"}, {})],
)
def test_runs_are_found_by_structure(widths: tuple[int, ...], kept: set[str], weight: dict[str, int]) -> None:
    model = Stack(*widths)
    before = names(model)
    bones = skeleton(model)
    assert {n.split(".")[1] for n in names(bones.module) if n.startswith("layers")} == kept
    assert bones.weights() == weight
    assert names(model) == before
    assert not any(p.is_meta for p in model.parameters())
    assert all(p.is_meta for p in bones.module.parameters())
    assert bones.module.scale.is_meta
    assert sum(bones.weight_of(n) for n in names(bones.module)) == len(before)


@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 16, 16, 16), (16, 16, 8, 8)])
def test_patterns_match_what_a_name_stands_for_and_nothing_else(widths: tuple[int, ...]) -> None:
    model = Stack(*widths)
    bones = skeleton(model)
    matched = [[n for n in names(model) if re.fullmatch(bones.pattern(k), n)] for k in names(bones.module)]
    assert sorted(n for group in matched for n in group) == sorted(names(model))


def test_layers_of_one_matrix_are_not_taken_together() -> None:
    """They may take turns in being cut by column and by row."""
    assert not skeleton(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).runs
    assert len(skeleton(nn.Sequential(Layer(), Layer())).runs) == 1


def test_one_layer_at_several_places_is_one_layer() -> None:
    layer = Layer()
    assert not skeleton(nn.Sequential(layer, layer, layer)).runs
    tied = Stack(8, 8)
    tied.layers[1].down.weight = tied.layers[0].down.weight
    assert not skeleton(tied).runs


def test_layers_that_stand_apart() -> None:
    bones = skeleton(Stack(8, 8, 8, 8), apart=["layers.0"])
    assert bones.weights() == {"layers.1": 3}
    assert [run.names for run in skeleton(Stack(8, 8, 8), kept=2).runs] == [["layers.0", "layers.1", "layers.2"]]
    assert len(skeleton(Stack(8, 8, 8), kept=2).module.layers) == 2  # type: ignore[arg-type]


def test_tied_parameters_stay_tied() -> None:
    model = Stack(8, 8)
    model.layers[0].up.weight = model.layers[0].down.weight
    copied = skeleton(model).module
    assert copied.layers[0].up.weight is copied.layers[0].down.weight  # type: ignore[index, union-attr]


def test_modules_without_shapes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'weight' has no shape yet"):
        skeleton(nn.LazyLinear(3))
