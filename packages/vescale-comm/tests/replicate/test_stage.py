"""Data parallelism around stages of a pipeline, as its engine uses it: micro-batches, then the end of the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_comm import _plugin
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
