"""Static modules under vescale_comm's data parallelism: the bits of modules that are not static."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Shard, Varying, parallelize_module, static

comm = pytest.importorskip("vescale_comm")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


ZERO = {"zero1": 1, "zero2": 2}


def trained(way: str, *, fixed: bool, rank: int) -> tuple[list[Tensor], list[int]]:
    """Losses and parameters after some steps with accumulated gradients, and programs per static module."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    chosen = [] if not fixed else list(model) if way == "fully_shard" else [model]
    for module in chosen:
        static(module)
    optimizer: Any = None
    if way in ZERO:
        optimizer = comm.DistributedOptimizer(model, torch.optim.AdamW, zero=ZERO[way], lr=1e-2)
    else:
        getattr(comm, way)(model)
    waits = optimizer or model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    seen = []
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        for context in (comm.no_sync(waits), contextlib.nullcontext()):
            with context:
                loss = F.mse_loss(model(x), x)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(p.detach().clone() for p in model.parameters())], [
        m.static_code().count("def program") for m in chosen
    ]


@pytest.mark.ranks(2, timeout=120)
def test_static_modules_train_as_others_do(rank: int) -> None:
    for way, programs in (("replicate", [1]), ("fully_shard", [1, 1]), ("zero1", [0]), ("zero2", [0])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [trained(way, fixed=fixed, rank=rank) for fixed in (False, True)]
        assert all(map(torch.equal, found[0][0], found[1][0])), way
        assert found[1][1] == programs, way
        told = [str(w.message) for w in caught if "has hooks" in str(w.message)]  # of the optimizer, which waits
        assert bool(told) == (way in ZERO)


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("way", ["replicate", "deferred", "torch"])
def test_static_tensor_parallel_modules_under_data_parallelism(way: str) -> None:
    """Gradients of DTensors over "tp" that are summed over "dp" by others; "deferred": of DTensors over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for fixed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        up, down = {"tp": Shard(0)}, {"tp": Shard(1)}
        if way == "deferred":
            plan = {r".*(norm\..*|down\.bias)": {"dp": Varying()}}
            plan |= {r".*up\..*": {**up, "dp": Varying()}, r".*down\.weight": {**down, "dp": Varying()}}
            parallelize_module(model, mesh, {"parameter": plan, "forward": {"input": {"dp": Shard(0)}}})
        else:
            parallelize_module(model, mesh["tp"], {"parameter": {r".*up\..*": up, r".*down\.weight": down}})
        if fixed:
            static(model)
        called: nn.Module = model
        if way == "torch":
            called = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        else:
            comm.replicate(model, *(() if way == "deferred" else (mesh["dp"],)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        part = 0 if way == "deferred" else mesh.get_local_rank("dp")
        torch.manual_seed(part)
        values = []
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + part))
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.to_local(), *(p.to_local().detach().clone() for p in model.parameters())]
        found.append(values)
    assert all(map(torch.equal, *found))
    assert model.static_code().count("def program") == 1
