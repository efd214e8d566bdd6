"""Data parallelism around stages of a pipeline, as its engine uses it: micro-batches, then the end of the step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_comm as vc
from vescale_comm import _plugin
from vescale_comm._replicate.stage import _shared
from vescale_comm.errors import PlanError
from vescale_testing import cached_mesh


@pytest.mark.ranks(4, pool=True)
def test_a_stage_is_averaged_over_its_data_dimension(rank: int) -> None:
    """Several micro-batches, modules of the same parameters for other shapes, and steps without zeroing."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wrap = _plugin.vescale_wrap_stage(module, mesh)
    assert wrap is not None
    stage, same = wrap(module), wrap(nn.Sequential(*module))
    solo = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    solo.load_state_dict(module.state_dict())  # both ranks of the dimension have those of its first one
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    data = torch.randn(2, 2, 3, 2, 2, generator=torch.Generator().manual_seed(7))
    for step in range(3):
        for number in range(3):
            (same if number == 1 else stage)(data[dp, tp, number]).sum().backward()
        for part in data[:, tp].reshape(6, 2, 2):
            (solo(part).sum() / 2).backward()
        for one in (stage, same):
            one.finish_grad_sync()  # the second one finds nothing to do
        for a, b in zip(module.parameters(), solo.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-6), step
    assert torch.equal(stage(data[0, 0, 0]), module(data[0, 0, 0]))


@pytest.mark.ranks(2, pool=True)
def test_stages_without_a_data_dimension_are_left_alone(rank: int) -> None:
    assert _plugin.vescale_wrap_stage(nn.Linear(1, 1), cached_mesh(2, names=("tp",))) is None
    assert _plugin.vescale_wrap_stage(nn.Linear(1, 1), cached_mesh(2)) is None
    assert _plugin.vescale_wrap_stage(nn.Linear(1, 1), cached_mesh(1, 2, names=("dp", "tp"))) is None
    assert _plugin.vescale_wrap_stage(nn.ReLU(), cached_mesh(2, names=("dp",))) is None


@pytest.mark.ranks(2, pool=True)
def test_stages_that_share_parameters_and_those_that_others_reduce(rank: int) -> None:
    """Tied weights are reduced once, what else is in the second stage as well; two that reduce one are refused."""
    mesh = cached_mesh(2, names=("dp",))
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    second[0].weight = first[0].weight
    twin = copy.deepcopy(nn.Sequential(*first, *second))
    stages = []
    for module in (first, second):  # as an engine does, one after the other
        wrap = _plugin.vescale_wrap_stage(module, mesh)
        assert wrap is not None
        stages.append(wrap(module))
    x = torch.randn(2, 2, 3, 2, generator=torch.Generator().manual_seed(3))
    for step in range(3):
        for number in range(2):
            stages[1](stages[0](x[rank, number])).square().sum().backward()
        for stage in stages:
            stage.finish_grad_sync()
        twin.zero_grad()
        for part in x.reshape(4, 3, 2):
            (twin(part).square().sum() / 2).backward()
        names = dict(twin.named_parameters())
        for prefix, module in (("0", first[0]), ("2", second[0]), ("3", second[1])):
            for name, param in module.named_parameters():
                want = names.get(f"{prefix}.{name}", names["0.weight"])
                assert torch.allclose(param.grad, want.grad, atol=1e-5), (step, prefix, name)
                param.grad = None if prefix != "0" else param.grad
        first.zero_grad()
    replica = stages[0]._replicas[0]
    stages[1]._replicas[1].close()
    replica.close()
    # What was closed is not taken for one that works.
    again = _plugin.vescale_wrap_stage(first, mesh)(first)  # type: ignore[misc]
    assert again._replicas[0] is not replica
    again(x[rank, 0]).sum().backward()
    twin.zero_grad()
    (sum(twin[:2](x[other, 0]).sum() for other in range(2)) / 2).backward()
    again.finish_grad_sync()
    assert torch.allclose(first[0].weight.grad, twin[0].weight.grad, atol=1e-6)
    with pytest.raises(PlanError, match=r"0\.weight: another stage here has it too.*\[0, 1\].*\[\d\]"):
        _shared(second, dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "x"))["x"])
    with pytest.raises(PlanError, match=r"weight: a replica .* reduces its gradients already"):
        vc.replicate(first[0])
    again._replicas[0].close()
    vc.replicate(second)
    with pytest.raises(PlanError, match=r"Sequential reduces gradients already\. The data parallelism of stages does"):
        _plugin.vescale_wrap_stage(second, mesh)
    vc.replicated(second).close()
