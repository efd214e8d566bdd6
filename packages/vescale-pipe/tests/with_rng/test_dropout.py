"""Dropout in stages that are cut over ranks as well: with vescale_rng, the masks of one device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from vescale_pipe import PipeEngine, PipePlan, manual, microbatch_seed

vescale_rng = pytest.importorskip("vescale_rng")

mse = functional.mse_loss


class Stage(nn.Module):
    """A layer whose columns of activations are cut over ranks while they are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.mesh: DeviceMesh | None = None
        self.library: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        if self.mesh is None:
            return functional.dropout(x, 0.4)
        some = self.library
        whole = some.DTensor.from_local(x, self.mesh, [some.Replicate()])
        dropped: Any = functional.dropout(whole.redistribute(placements=[some.Shard(1)]), 0.4)
        out: Tensor = dropped.full_tensor()
        return out


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize(("schedule", "library"), [("zb_h1", "torch"), ("1f1b", "vescale_dtensor")])
def test_a_pipeline_of_tensor_parallel_stages_drops_as_one_process(rank: int, schedule: str, library: str) -> None:
    """The example of the README: seeded by the plan, two stages of two ranks each, against a plain loop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    stages = [Stage(), Stage()]
    reference = copy.deepcopy(stages)
    own = pytest.importorskip(library) if library != "torch" else None
    for stage in stages:
        stage.mesh = mesh["tp"]
        stage.library = own or torch_dtensor
    plan = PipePlan(schedule=schedule, num_microbatches=3, seed=5, timeout=20)
    engine = PipeEngine(manual(stages), mesh, plan, mse)
    torch.manual_seed(100 + mesh.get_local_rank("pp"))  # ranks of a stage alike, stages not: it does not matter
    mine = engine.stages[0]
    for step in range(3):
        batch = torch.randn(7, 8, generator=torch.Generator().manual_seed(step))
        with contextlib.nullcontext() if own else vescale_rng.single_device():
            loss, _ = engine(batch, target=batch)
        total = torch.zeros(())
        for m, part in enumerate(batch.tensor_split(3)):
            torch.manual_seed(microbatch_seed(5, step, m))
            one = mse(reference[1](reference[0](part)), part) * (len(part) / 7)
            one.backward()
            total = total + one.detach()
        assert torch.equal(loss, total)
        assert torch.equal(stages[mine].lin.bias.grad, reference[mine].lin.bias.grad)
        assert torch.equal(stages[mine].lin.weight.grad, reference[mine].lin.weight.grad)
    engine.close()
