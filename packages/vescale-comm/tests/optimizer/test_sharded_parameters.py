"""Parameters that are DTensors: their local parts are sharded further, over the data parallel ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_comm._optimizer.norms import clip_grad_norm_, get_total_norm
from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm.errors import PlanError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def parallel(model: nn.Module, mesh: object) -> nn.Module:
    made: nn.Module = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return made


@pytest.mark.ranks(4)
def test_tensor_parallel_parameters_train_as_on_one_device(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = build()
    alone = torch.optim.AdamW(reference.parameters(), lr=0.02)
    norms = []
    for x in data:
        alone.zero_grad()
        reference(x).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        alone.step()
    mine = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    for zero in (1, 2):
        model = parallel(build(), mesh["tp"])
        optimizer = DistributedOptimizer(
            model, torch.optim.AdamW, zero=zero, group_or_mesh=mesh["dp"], bucket_mb=1e-4, lr=0.02
        )
        for x, norm in zip(data, norms, strict=True):
            optimizer.zero_grad()
            model(x[mine]).square().mean().backward()
            torch.testing.assert_close(get_total_norm(model), norm)
            clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
        optimizer.finish_param_sync()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            whole = a.full_tensor() if hasattr(a, "full_tensor") else a
            torch.testing.assert_close(whole, b, rtol=1e-10, atol=1e-12)
        # The state speaks of whole parameters: the boxes of all ranks cover each once per tensor parallel copy.
        boxes = [
            (name, tuple(values["exp_avg"].global_shape), [tuple(box) for box in values["exp_avg"].boxes])
            for name, values in optimizer.state_dict()["state"].items()
        ]
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, boxes)
        for name, parameter in reference.named_parameters():
            count = torch.zeros(parameter.shape)
            for shape, parts in [(s, p) for one in everyone for n, s, p in one if n == name]:
                assert shape == tuple(parameter.shape)
                for offset, size in parts:
                    count[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
            copies = 1 if name in ("up.weight", "up.bias", "down.weight") else 2
            assert (count == copies).all(), name
    optimizer.close()
    with pytest.raises(PlanError, match=r"up\.weight of shape \[10, 6\] is sharded .* Muon would"):
        DistributedOptimizer([("up.weight", model.up.weight)], torch.optim.Muon, group_or_mesh=mesh["dp"])
