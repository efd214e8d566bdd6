"""Classes of parameters that a plugin knows: their local part is sharded, their partial gradients are summed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_comm._fsdp import fully_shard, kinds
from vescale_comm._shards import Box
from vescale_comm.emulator import emulate
from vescale_comm.errors import PlanError


class Cut(nn.Parameter):
    """Rows of a matrix: half of them on each rank of a mesh axis, or all of them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    mesh: DeviceMesh
    rows: tuple[int, int, int]

    @staticmethod
    def make(local: Tensor, mesh: DeviceMesh, rows: tuple[int, int, int]) -> Cut:
        made = torch.Tensor._make_subclass(Cut, local, True)
        made.mesh, made.rows = mesh, rows
        return made


def layout(tensor: Tensor) -> Any:
    if not isinstance(tensor, Cut):
        return None
    start, count, total = tensor.rows
    return SimpleNamespace(
        global_shape=(total, 3),
        global_stride=(3, 1),
        boxes=[Box((start, 0), (count, 3))],
        local=tensor.as_subclass(Tensor).detach(),
        replicas=(0, 1) if count < total else (0, 2),
        partial=False,
    )


def reduction(parameter: Tensor) -> Any:
    # The rows that all have are used for half of the batch on each rank, so their gradient is a part of a sum.
    return (parameter.mesh, () if parameter.rows[1] < parameter.rows[2] else (0,))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "plugin_layout", layout)
    monkeypatch.setattr(kinds, "gradient_reduction", reduction)


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        rank = mesh.get_local_rank()
        self.part = Cut.make(torch.arange(60.0).view(20, 3) + 60 * rank, mesh, (20 * rank, 20, 40))
        self.same = Cut.make(torch.arange(60.0).view(20, 3), mesh, (0, 20, 20))


@pytest.mark.usefixtures("plugin")
def test_shards_of_what_a_plugin_knows() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = fully_shard(Model(mesh["tp"]), mesh["dp"])
        model.forward = lambda x: (model.part * x).sum() + (model.same * x).sum()
        model(torch.tensor(rank + 1.0)).backward()
        dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        part, same = model.part, model.same
        assert part.vescale.shape == (40, 3)
        assert part.vescale.whole.boxes == (Box((20 * tp, 0), (20, 3)),)
        assert [group.size() for group in part.vescale.groups] == [2, 2]
        assert [group.size() for group in same.vescale.groups] == [2]
        assert [group.size() for group in same.vescale.copies] == [2]
        # Means over dp, of ranks (0, 2) or (1, 3), and sums over tp where parts are to be summed.
        assert torch.equal(part.grad, torch.full((part.numel(),), ((tp + 1) + (tp + 3)) / 2))
        assert torch.equal(same.grad, torch.full((same.numel(),), (1 + 2 + 3 + 4) / 2))
        whole = torch.arange(60.0) + 60 * tp
        assert torch.equal(part.detach(), whole[part.vescale.start : part.vescale.stop])
        assert (part.numel(), same.numel()) == [(32, 32), (28, 28)][dp]

    emulate(on_rank, 4, "canonical")


def test_a_class_that_nobody_knows_is_refused() -> None:
    def on_rank(rank: int) -> None:
        model = Model(init_device_mesh("cpu", (2,)))
        with pytest.raises(PlanError, match=r"part is a Cut, a class that no plugin knows"):
            fully_shard(model)

    emulate(on_rank, 2, "canonical")


@pytest.mark.usefixtures("plugin")
def test_copies_that_may_lie_along_either_axis_are_refused() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        model = nn.Module()
        model.part = Cut.make(torch.zeros(2, 3), mesh, (0, 2, 2))
        with pytest.raises(PlanError, match="part: it is not clear along which axes"):
            fully_shard(model)

    emulate(on_rank, 4, "canonical")
