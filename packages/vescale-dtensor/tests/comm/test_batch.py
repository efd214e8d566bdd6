"""Reducing many tensors at once, with and without a plugin's collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor._comm import batch, record
from vescale_dtensor._mesh import mesh_info
from vescale_testing import cached_mesh


def _tensors(rank: int) -> list[torch.Tensor]:
    return [torch.full((3,), rank + 1.0), torch.full((2, 2), 10.0 * rank), torch.tensor(rank), torch.ones(1)]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX], ids=str)
def test_one_all_reduce_per_group_and_dtype(rank: int, op: Any) -> None:
    mesh = mesh_info(cached_mesh(2, 2))
    seen: list[str] = []
    record.listeners.append(lambda event: seen.append(event.name))
    try:
        places = [(mesh, (0, 1)), (mesh, (0, 1)), (mesh, (0, 1)), (mesh, ())]
        out = batch.all_reduce_batch(_tensors(rank), places, op)
    finally:
        record.listeners.pop()
    over_ranks = [torch.stack(parts) for parts in zip(*(_tensors(r) for r in range(4)), strict=True)]
    expected = [o.sum(0) if op == dist.ReduceOp.SUM else o.amax(0) for o in over_ranks[:3]] + [torch.ones(1)]
    for o, e in zip(out, expected, strict=True):
        assert torch.equal(o, e)
    assert seen == ["all_reduce", "all_reduce"]


@pytest.mark.ranks(4, pool=True)
def test_a_plugin_reduces_instead(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        def wait(self) -> None:
            pass

    class Provider:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def all_reduce(self, tensors: Any, mesh: Any, axes: Any, op: str) -> Done:
            self.calls.append((len(tensors), axes, op))
            for t in tensors:
                dist.all_reduce(t, group=mesh.get_group(axes[0]))
            return Done()

    provider = Provider()
    monkeypatch.setattr(batch, "_provider", lambda: provider)
    mesh = mesh_info(cached_mesh(4))
    out = batch.all_reduce_batch(_tensors(rank)[:2], [(mesh, (0,))] * 2)
    assert torch.equal(out[0], torch.full((3,), 10.0))
    assert torch.equal(out[1], torch.full((2, 2), 60.0))
    assert provider.calls == [(2, (0,), "sum")]
