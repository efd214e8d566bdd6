"""Meshes: replicas of shards, and shards of what tensor parallelism has cut already."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_comm._fsdp import full_parameters, fully_shard
from vescale_comm._optimizer.norms import clip_grad_norm_, get_total_norm
from vescale_comm._plan import Rows
from vescale_comm.emulator import emulate
from vescale_comm.errors import PlanError


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(2))).double()


def inputs(index: int, step: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + index), dtype=torch.float64)


def reference(parts: int) -> tuple[nn.Module, float]:
    """Train on one device; return the model, and the norm of the last gradients."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        (sum(model(inputs(index, step)).square().sum() for index in range(parts)) / parts).backward()
        optimizer.step()
    return model, math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))


def train(model: nn.Module, index: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        model(inputs(index, step)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_replicas_of_shards(shape: tuple[int, int]) -> None:
    world = math.prod(shape)
    want, norm = reference(world)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(make(), mesh, granularity=Rows(1))
        train(model, rank)
        info = next(model.parameters()).vescale
        assert [group.size() for group in info.groups] == [shape[1]]
        assert [group.size() for group in info.copies] == ([shape[0]] if shape[0] > 1 else [])
        assert float(get_total_norm(model)) == pytest.approx(norm, rel=1e-10)
        # FSDP2 of torch cannot clip parameters of two meshes, or plain ones among them.
        extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        extra.grad = torch.full((1,), norm, dtype=torch.float64)
        clip_grad_norm_([*model.parameters(), extra], norm / 2)
        assert float(get_total_norm(model)) == pytest.approx(norm / 2 / math.sqrt(2), rel=1e-5)
        with full_parameters(model):
            for (name, got), whole in zip(model.named_parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(got.detach(), whole.detach(), rtol=0, atol=1e-10, msg=name)

    emulate(on_rank, world, "canonical")


def test_replicas_with_a_16_bit_wire_keep_float32_sums() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        model = fully_shard(nn.Sequential(nn.Linear(1, 1, bias=False)), mesh, reduce_dtype=torch.bfloat16)
        # Each replica's sum is 1 + 2**-7, the least step of bfloat16; their sum needs one bit more.
        model(torch.tensor([[[1.0, 2**-7], [1.0, 2**-6]][rank // 2][rank % 2]])).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient.numel() == 0 or float(gradient) == (2 + 3 * 2**-7) / 4

    emulate(on_rank, 4, "canonical")


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = make()
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for name in ("weight", "bias"):
            whole = getattr(layer.norm, name)
            setattr(layer.norm, name, nn.Parameter(distribute_tensor(whole, mesh, [Replicate()])))
        layer.norm.register_forward_pre_hook(lambda module, args: _whole(mesh, *args))
        layer.norm.register_forward_hook(lambda module, args, output: output.to_local())
    return model


def _whole(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor]:
    return (DTensor.from_local(x, mesh, [Replicate()], run_check=False),)


def test_shards_of_tensor_parallel_parameters() -> None:
    want, norm = reference(2)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for granularity in (1, Rows(2)):
            model = fully_shard(tensor_parallel(mesh["tp"]), mesh["dp"], granularity=granularity)
            train(model, mesh.get_local_rank("dp"))
            infos: dict[str, Any] = {name: parameter.vescale for name, parameter in model.named_parameters()}
            assert infos["0.up.weight"].shape == (12, 6)
            assert [box.shape for box in infos["0.up.weight"].whole.boxes] == [(6, 6)]
            assert len(infos["0.up.weight"].groups) == 2
            assert len(infos["0.norm.weight"].groups) == 1
            assert float(get_total_norm(model)) == pytest.approx(norm, rel=1e-10)
            for value in model.state_dict().values():
                assert sum(box.numel for box in value.boxes) == value.plain().numel()
            with full_parameters(model):
                for (name, got), whole in zip(model.named_parameters(), want.parameters(), strict=True):
                    assert isinstance(got, DTensor)
                    torch.testing.assert_close(got.full_tensor().detach(), whole.detach(), rtol=0, atol=1e-10, msg=name)

    emulate(on_rank, 4, "canonical")


def test_meshes_of_other_shapes_are_refused() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(PlanError, match="a mesh of 3 axes"):
            fully_shard(make(), init_device_mesh("cpu", (1, 2, 1)))
        with pytest.raises(PlanError, match="got 3"):
            fully_shard(make(), 3)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
        fully_shard(model, mesh)
        assert model.weight.vescale.whole.boxes[0].offset == (rank, 0)

    emulate(on_rank, 2, "canonical")


def test_without_a_process_group() -> None:
    with pytest.raises(PlanError, match="init_process_group"):
        fully_shard(make())
