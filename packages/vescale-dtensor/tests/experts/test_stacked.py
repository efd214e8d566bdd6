"""Which modules are taken for experts, and what is left of the module's own class."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import PlanError, Shard, parallelize_module
from vescale_dtensor._experts import expert_parallel
from vescale_dtensor._experts.stacked import let_travel, stacked_experts, state_of
from vescale_testing import cached_mesh, fake_ranks


class Stacked(nn.Module):
    """Three arguments and stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 5))
        self.bias = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return x + (weights * index).sum() * self.up.sum()


class Unlike(Stacked):
    """Leading dims differ."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(2, 4))


class Optional(Stacked):
    """As the experts of GptOss."""

    def forward(self, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return x


class OneArgument(Stacked):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


def test_found_by_structure() -> None:
    assert stacked_experts(Stacked()) == stacked_experts(Optional()) == 3
    for other in (Unlike(), OneArgument(), nn.Linear(3, 3), nn.Conv2d(3, 3, 1), nn.Bilinear(3, 4, 5), nn.Identity()):
        assert stacked_experts(other) is None, other


def test_the_class_stays_what_it_was() -> None:
    module, plain = Stacked(), Stacked()
    plain.load_state_dict(module.state_dict())
    let_travel(module, 3)
    args = torch.ones(2, 4), torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int64)
    assert isinstance(module, Stacked)
    assert type(module).__name__ == "Stacked"
    assert stacked_experts(module) is None, "once is enough"
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(one(*args), plain(*args)), "not distributed: the model's own forward"
        assert list(one.state_dict()) == ["up", "bias"]
        assert state_of(one) is not None
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(*args), plain(*args))


def test_the_plan_places_stacked_parameters() -> None:
    with fake_ranks(4):
        mesh = cached_mesh(2, 2, names=("dp", "ep"))
        model = nn.ModuleDict({"a": Stacked(), "b": Stacked(), "c": nn.Linear(2, 2)})
        parallelize_module(model, mesh, expert_parallel(modules="a"), check=False)
        assert model["a"].up.placements[1] == Shard(0)
        assert model["a"].bias.placements[1] == Shard(0)
        assert model["b"].up.placements[1] != Shard(0)
        assert state_of(model["b"]) is None


def test_plans_that_cannot_be_are_refused() -> None:
    with fake_ranks(4):
        mesh = cached_mesh(4, names=("tp",))
        with pytest.raises(PlanError, match=r"spread experts over \['ep'\]; the axes of the mesh are \['tp'\]"):
            parallelize_module(Stacked(), mesh, expert_parallel())
        with pytest.raises(PlanError, match="found no experts in Linear"):
            parallelize_module(nn.Linear(2, 2), mesh, expert_parallel("tp"))
        with pytest.raises(PlanError, match="it has no names"):
            parallelize_module(Stacked(), cached_mesh(4), expert_parallel("tp"))
