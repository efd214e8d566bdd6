"""What a call tells of a model: which dims are packed, which layers may be left out, what is alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor._auto.rehearse import Example
from vescale_dtensor._auto.skeleton import skeleton
from vescale_dtensor._auto.trace import Trace
from vescale_dtensor._irregular import Interleaved


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Stack(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between, self.first = between, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, grown: bool = True) -> Tensor:
        x = self.first(x) if grown else x
        for layer in self.layers:
            x = layer(x) * 2 if self.between else layer(x)
        return x


X = torch.ones(4, 8)


@pytest.mark.parametrize(
    ("between", "grown", "apart"),
    [(False, True, []), (False, False, ["layers.0"]), (True, True, ["layers.0", "layers.1", "layers.2"])],
)
def test_layers_are_left_out_where_each_takes_what_the_last_gave(between: bool, grown: bool, apart: list[str]) -> None:
    bones = skeleton(Stack(between), kept=2)
    assert Trace(bones, Example((X, grown), {})).apart(bones.runs[0]) == apart


def test_layers_in_a_row_are_alike() -> None:
    units = Trace(skeleton(Stack(True), kept=None), Example((X,), {})).units()
    layers = [u.likeness for u in units if u.name.startswith("layers")]
    assert len(layers) == 3
    assert len(set(layers)) == 1
    assert len({u.likeness for u in units}) == 2


class Packs(nn.Module):
    """One weight for two things, which are told apart as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t()
        parts = y.chunk(2, -1) if self.how == "chunk" else y.view(4, 2, 6).unbind(1)
        return parts[0] * parts[1]


@pytest.mark.parametrize("how", ["chunk", "view"])
def test_blocks_of_a_weight_that_a_module_uses_itself(how: str) -> None:
    (unit,) = Trace(skeleton(Packs(how)), Example((X,), {})).units()
    kinds = [t for option in unit.groups[0].options for _, t in option]
    assert [(t.dim, t.blocks) for t in kinds if isinstance(t, Interleaved)] == [(0, 2)]
    assert {0, 1} <= set(kinds)


def test_blocks_of_torchs_attention() -> None:
    model = nn.MultiheadAttention(8, 2)
    (unit,) = Trace(skeleton(model), Example((X, X, X), {})).units()
    cut = {(n, t.dim, t.blocks) for g in unit.groups for o in g.options for n, t in o if isinstance(t, Interleaved)}
    assert {("in_proj_weight", 0, 3), ("in_proj_bias", 0, 3)} <= cut
