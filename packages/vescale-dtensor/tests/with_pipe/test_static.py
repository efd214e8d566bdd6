"""Static stages of vescale_pipe's pipelines: the bits of stages that are not static."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import static
from vescale_dtensor.errors import StaticWarning

pipe = pytest.importorskip("vescale_pipe")


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Again(nn.Module):
    """Computes its activations again on the way back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def trained(schedule: str, num_stages: int, *, fixed: bool, again: bool) -> tuple[list[Tensor], int]:
    """Losses and parameters after some steps, and the number of programs on this rank."""
    torch.manual_seed(0)
    inner: list[nn.Module] = [Stage() for _ in range(num_stages)]
    if fixed:
        for stage in inner:
            static(stage)
    stages = [Again(s) for s in inner] if again else inner
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    plan = pipe.PipePlan(schedule=schedule, num_microbatches=4, seed=5, timeout=30)
    engine = pipe.PipeEngine(pipe.manual(stages), mesh, plan, F.mse_loss)
    optimizer = torch.optim.AdamW([p for s in stages for p in s.parameters()], lr=1e-2)
    losses = []
    for step in range(2):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(engine(batch, target=batch)[0])
        optimizer.step()
    engine.close()
    programs = sum(s.static_code().count("def program") for s in inner) if fixed else 0
    return [*losses, *(p.detach().clone() for s in stages for p in s.parameters())], programs


@pytest.mark.ranks(2, timeout=120)
def test_static_stages_train_as_others_do() -> None:
    for schedule, num_stages, again in (("1f1b", 2, True), ("interleaved_1f1b", 4, False)):
        one, _ = trained(schedule, num_stages, fixed=False, again=again)
        two, programs = trained(schedule, num_stages, fixed=True, again=again)
        assert all(map(torch.equal, one, two)), schedule
        assert programs == num_stages // 2


@pytest.mark.ranks(2, timeout=120)
def test_stages_whose_backward_is_split_say_that_they_stay_dynamic() -> None:
    """Schedules with a backward in two parts watch every function, which a program would pass by."""
    for schedule, num_stages in (("zb_h1", 2), ("zb_v", 4)):
        one, _ = trained(schedule, num_stages, fixed=False, again=False)
        with pytest.warns(StaticWarning, match="Stage runs dynamically: it is called under the torch-function mode"):
            two, programs = trained(schedule, num_stages, fixed=True, again=False)
        assert all(map(torch.equal, one, two)), schedule
        assert programs == 0
