"""Costs of collectives: fitted to two times, the same on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import Cost, PeerTransport, calibrate, measure, measure_beside


class Clocked:
    """A transport of one rank whose collectives take a known time, by a clock of its own."""

    name, rank, size, canonical = "clocked", 0, 1, True

    def __init__(self):
        self.now = 0.0

    def allocate(self, numel, dtype, device):
        return torch.zeros(numel, dtype=dtype)

    def reduce_scatter(self, buffer):
        return self._take(1e-3 + 2e-9 * buffer.nbytes)

    def all_gather(self, buffer):
        return self._take(2e-3 + 1e-9 * buffer.nbytes)

    def all_reduce(self, buffer):
        return self._take(4e-3)

    def _take(self, seconds):
        self.now += seconds
        return self

    def wait(self):
        pass


def test_fit_finds_latency_and_bandwidth(monkeypatch):
    clocked = Clocked()
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clocked.now)
    costs = measure(clocked, torch.device("cpu"), seconds=0.05)
    expected = {"reduce_scatter": (1e-3, 2e-9), "all_gather": (2e-3, 1e-9), "all_reduce": (4e-3, 0.0)}
    for operation, (alpha, beta) in expected.items():
        assert costs[operation].alpha == pytest.approx(alpha)
        assert costs[operation].beta == pytest.approx(beta)
        assert costs[operation].seconds(1e6) == pytest.approx(alpha + 1e6 * beta)


def test_beside_a_computation_counts_what_is_added(monkeypatch):
    clocked = Clocked()
    products = []

    def product(a, b):
        clocked.now += 1e-4
        products.append(b.data_ptr())

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clocked.now)
    monkeypatch.setattr(calibrate.torch, "mm", product)
    alone = measure(clocked, torch.device("cpu"), seconds=0.05)
    costs = measure_beside(clocked, torch.device("cpu"), alone, seconds=0.05)
    # On this clock nothing is hidden: what is added is what it takes alone, whatever is computed.
    for operation in calibrate.OPERATIONS:
        assert costs[operation].alpha == pytest.approx(alone[operation].alpha)
        assert costs[operation].beta == pytest.approx(alone[operation].beta)
    assert len(set(products)) == calibrate.LAYERS


@pytest.mark.ranks(2)
def test_all_ranks_get_the_same_numbers():
    transport, cpu = PeerTransport(dist.group.WORLD), torch.device("cpu")
    costs = measure(transport, cpu, seconds=0.02)
    beside = measure_beside(transport, cpu, costs, seconds=0.02)
    assert set(costs) == set(beside) == set(calibrate.OPERATIONS)
    everywhere: list[object] = [None] * 2
    numbers = [(cost.alpha, cost.beta) for each in (costs, beside) for cost in each.values()]
    dist.all_gather_object(everywhere, numbers)
    assert everywhere[0] == everywhere[1]
    assert all(isinstance(cost, Cost) and cost.seconds(1 << 20) > 0 for cost in costs.values())
