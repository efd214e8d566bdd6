"""Parameters that are sharded already: torch's DTensor, and a class that a plugin knows."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from vescale_comm import _plugins
from vescale_comm._replicate import DistributedDataParallel
from vescale_comm.errors import CommError
from vescale_testing import cached_mesh


@pytest.mark.ranks(4, pool=True)
def test_dtensors_of_torch_over_the_other_dimension(rank: int) -> None:
    """Column- and row-parallel layers and a replicated norm on tp, replicas on dp, against one device."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    solo, net = build(), build()
    places = {"1.weight": Shard(0), "1.bias": Shard(0), "3.weight": Shard(1)}
    for name, param in list(net.named_parameters()):
        module, _, leaf = name.rpartition(".")
        whole = distribute_tensor(param.detach(), tp, [places.get(name, Replicate())])
        setattr(net.get_submodule(module), leaf, nn.Parameter(whole))
    model = DistributedDataParallel(net, dp, transport="p2p", bucket_mb=1e-5)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False) for module in (net, solo)]
    data = torch.randn(6, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step != 3)
        mine = data[step].chunk(2)[dp.get_local_rank()]
        x = distribute_tensor(mine, tp, [Replicate()])
        with model.no_sync():
            (model(x[:2]).full_tensor() ** 2).mean().backward()
        (model(x[2:]).full_tensor() ** 2).mean().backward()
        for part in data[step].split(2):
            ((solo(part) ** 2).mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(net.parameters(), solo.parameters(), strict=True):
        assert a.grad.placements == a.placements
        assert (a.full_tensor() - b).abs().max() < 1e-10
    model.close()


class Sum(torch.Tensor):
    """A parameter whose gradients are parts of a sum over an axis of a mesh: of each gradient, this rank's part."""

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor, requires_grad: bool = False) -> Sum:
        return torch.Tensor._make_subclass(cls, local, requires_grad)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield None
    _plugins.reset()


@pytest.mark.ranks(4, pool=True)
def test_one_reduction_over_all_axes_of_a_partial_gradient(rank: int) -> None:
    """Averaged over the ranks with other data, summed over the axis that the plugin names."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    partial = [True]
    hookimpl = pluggy.HookimplMarker("vescale_comm")

    def vescale_layout(tensor: Tensor) -> Any:
        if not isinstance(tensor, Sum):
            return None
        box = SimpleNamespace(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
        return SimpleNamespace(
            global_shape=tuple(tensor.shape),
            global_stride=tensor.stride(),
            boxes=[box],
            local=tensor.detach().as_subclass(Tensor),
            replicas=(0, 1),
            partial=partial[0],
        )

    def vescale_gradient_reduction(param: Any) -> Any:
        return (mesh, (1,)) if isinstance(param, Sum) and partial[0] else None

    _plugins.reset()
    toy = ModuleType("toy")
    vars(toy).update({one.__name__: hookimpl(one) for one in (vescale_layout, vescale_gradient_reduction)})
    _plugins.manager().register(toy, name="toy")
    try:
        net = nn.Module()
        net.plain, net.sum = nn.Parameter(torch.ones(2)), nn.Parameter(Sum(torch.ones(3)))
        model = DistributedDataParallel(net, mesh["dp"], transport="p2p")
        assert [state.lane.transport.size for state in model.replica.reducer.lanes] == [2, 4]
        for _ in range(2):
            model.zero_grad()
            (net.plain * rank).sum().backward(retain_graph=True)
            model.zero_grad()
            ((net.plain * rank).sum() + (net.sum.as_subclass(Tensor) * rank).sum()).backward()
            own = mesh.get_local_rank("tp")
            assert torch.equal(net.plain.grad, torch.full((2,), (own + own + 2) / 2))
            assert torch.equal(net.sum.grad.as_subclass(Tensor), torch.full((3,), (0 + 1 + 2 + 3) / 2))
        model.close()
    finally:
        _plugins.reset()


def test_pending_sums_of_torch_are_resolved_in_place() -> None:
    """Whatever placements autograd left, the parameter's own come out, or a pending sum where one is wanted."""
    from vescale_comm._gradients.local import local_gradient
    from vescale_testing import run_threads

    def body(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        param = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        part = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])
        assert local_gradient("p", param, part, ()).tolist() == [3.0] * 4
        assert local_gradient("p", param, part, (0,)).tolist() == [rank + 1.0] * 4
        whole = distribute_tensor(torch.full((4,), 6.0), mesh, [Replicate()])
        pieces = local_gradient("p", param, whole, (0,))
        total = pieces.clone()
        torch.distributed.all_reduce(total)
        assert total.tolist() == [6.0] * 4
        sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert local_gradient("p", param, sharded, ()).tolist() == [0, 1, 2, 3]

    run_threads(2, body)


def test_a_pending_sum_that_no_reduction_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_comm import _hooks
    from vescale_comm._gradients.local import local_gradient

    grad = Sum(torch.ones(2))
    monkeypatch.setattr(_hooks, "plugin_layout", lambda _: SimpleNamespace(partial=True, local=torch.ones(2)))
    with pytest.raises(CommError, match=r"p: its gradient is a pending sum.*must name them"):
        local_gradient("p", grad, grad, ())
    assert local_gradient("p", grad, grad, (0,)).tolist() == [1, 1]
