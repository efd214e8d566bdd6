"""Meshes of several dimensions: the pipeline is one of them, plugins wrap stages along the others."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from vescale_pipe import _plugins
from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe.errors import PipeError

mse = functional.mse_loss
EXAMPLE = (torch.zeros(2, 4),), {}


class Doubling(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return tuple(2 * one if isinstance(one, Tensor) else one for one in self.inner(*args))


@pytest.mark.ranks(4, timeout=60)
def test_one_pipeline_per_row_of_a_mesh(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines side by side do not meet; each stage is wrapped once, with the mesh of the other dimension."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()
    seen: list[tuple[str, ...]] = []

    def vescale_wrap_stage(module: nn.Module, mesh: Any) -> Any:
        seen.append(mesh.mesh_dim_names)
        return Doubling

    plugin = ModuleType("toy")
    plugin.vescale_wrap_stage = pluggy.HookimplMarker("vescale_pipe")(vescale_wrap_stage)  # type: ignore[attr-defined]
    _plugins.manager().register(plugin)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    engine = PipeEngine(model, mesh, PipePlan(num_microbatches=2, at=["1"], timeout=20), mse, example=EXAMPLE)
    assert engine.num_ranks == 2
    assert engine.stages == (mesh.get_local_rank("pp"),)
    torch.manual_seed(mesh.get_local_rank("dp"))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        loss, _ = engine(x, target=y)
        total = torch.zeros(())
        for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            part = mse(2 * twin[1](2 * twin[0](a)), b) * 0.5
            part.backward()
            total = total + part.detach()
        assert torch.equal(loss, total)
        names = dict(twin.named_parameters())
        for name, mine in engine.named_parameters():
            assert torch.equal(mine.grad, names[name].grad)
    assert seen == [("dp",)]
    engine.close()


@pytest.mark.ranks(2, timeout=60)
def test_a_mesh_of_one_dimension_and_a_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, y = torch.zeros(4, 4), torch.ones(4, 4)
    found = []
    for where in (mesh, dist.group.WORLD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = PipeEngine(model, where, PipePlan(num_microbatches=2, at=["1"], timeout=20), mse, example=EXAMPLE)
        found.append(engine(x, target=y)[0])
        engine.close()
    assert torch.equal(*found)
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(PipeError, match=r"the mesh has dimensions \('a', 'b'\); name that of the pipeline"):
        PipeEngine(model, square, PipePlan(num_microbatches=2), mse)


@pytest.mark.ranks(2, timeout=60)
def test_ranks_that_need_no_batch_may_pass_none(rank: int) -> None:
    """Stages by hand: the first rank needs the input, the last one the target."""
    from vescale_pipe._split import manual

    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    engine = PipeEngine(manual(stages), dist.group.WORLD, PipePlan(num_microbatches=2, timeout=20), mse)
    loss, _ = engine(x if rank == 0 else None, target=y if rank == 1 else None)
    want = sum(
        (mse(stages[1](stages[0](a)), b) * (len(a) / 5)).detach()
        for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True)
    )
    assert torch.equal(loss, want)
    engine.close()


@pytest.mark.ranks(2, timeout=60)
def test_weights_of_other_ranks_can_be_freed(rank: int) -> None:
    """They are meta afterwards; other shapes, which need another look at the model, still work."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    plan = PipePlan(num_microbatches=2, at=["1"], timeout=20, release=True)
    engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=EXAMPLE)
    assert [one.weight.is_meta for one in model] == [rank != 0, rank != 1]
    names = dict(twin.named_parameters())
    for rows in (4, 7, 8):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        engine(x, target=y)
        for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (mse(twin(a), b) * (len(a) / rows)).backward()
        for name, mine in engine.named_parameters():
            assert not mine.is_meta
            assert torch.equal(mine.grad, names[name].grad)
    engine.close()
