"""What is measured along a mesh is the same on all of its ranks."""

from __future__ import annotations

import pytest

from vescale_comm._mesh import calibrate, entry
from vescale_comm._report import HostCosts
from vescale_comm._transport import Cost
from vescale_testing import cached_mesh


@pytest.mark.ranks(4)
def test_the_slowest_ranks_of_the_whole_mesh_count(rank, monkeypatch):
    def measure(transport, device, *, seconds):
        assert seconds == 0.5
        one = transport.size
        return {
            "reduce_scatter": Cost(one + rank, 3.0 - rank),
            "all_gather": Cost(one, 2e-9),
            "all_reduce": Cost(0.0, rank * 0.125),
        }

    def measure_beside(transport, device, alone, *, seconds):
        return {name: Cost(2 * cost.alpha, cost.beta) for name, cost in alone.items()}

    monkeypatch.setattr(entry, "measure", measure)
    monkeypatch.setattr(entry, "measure_beside", measure_beside)
    monkeypatch.setattr(entry, "measure_host", lambda group, device: HostCosts(copy=rank, unit=3.0 - rank))
    mesh = cached_mesh(1, 2, 2, names=("pod", "dp", "tp"))
    costs = calibrate(mesh, together=[("dp", "tp"), ("pod", "dp")], transport="p2p", seconds=0.5)
    assert {key: cost.ranks for key, cost in costs.axes.items()} == {("dp",): 2, ("tp",): 2, ("dp", "tp"): 4}
    for cost in costs.axes.values():
        assert cost.algorithm == "direct"
        assert cost.operations == {
            "reduce_scatter": (cost.ranks + 3, 3.0),
            "all_gather": (cost.ranks, 2e-9),
            "all_reduce": (0.0, 0.375),
        }
        assert cost.beside == {name: (2 * alpha, beta) for name, (alpha, beta) in cost.operations.items()}
        assert not cost.stages
    assert costs.host == HostCosts(copy=3.0, unit=3.0)
    assert set(calibrate(mesh, ["tp", "pod"], transport="p2p", seconds=0.5).axes) == {("tp",)}
