"""What is measured on a host, by clocks that the test sets, and on a real one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_comm._mesh import host
from vescale_comm._mesh.host import measure_host


def test_python_is_shared_out_to_units_and_parameters(monkeypatch):
    # A step takes 1 ms and 10 us per layer; sharded 0.3 ms per unit and 20 us per parameter more; hooks 7 us each.
    def seconds(module, device):
        layers = len(module[0])
        extra = host.UNITS * (3e-4 + 2 * layers * 2e-5) if isinstance(module, Sharded) else 0.0
        return 1e-3 + 1e-5 * layers * host.UNITS + extra

    class Sharded(torch.nn.Sequential):
        pass

    plain = host._module
    monkeypatch.setattr(host, "_step_seconds", seconds)
    monkeypatch.setattr(host, "_sharded", lambda layers, group, device: Sharded(*plain(layers, device)))
    monkeypatch.setattr(host, "_hooked_seconds", lambda module, device: seconds(module, device) + 60 * 7e-6)
    monkeypatch.setattr(host, "_copy_seconds", lambda device: 1e-10)
    monkeypatch.setattr(host, "_fresh_seconds", lambda device: 2e-10)
    found = measure_host(None, torch.device("cpu"))
    assert found.unit == pytest.approx(3e-4)
    assert found.shard == pytest.approx(2e-5)
    assert found.hook == pytest.approx(7e-6)
    assert (found.copy, found.fresh) == (1e-10, 2e-10)


@pytest.mark.ranks(2)
def test_this_host():
    found = measure_host(dist.group.WORLD, torch.device("cpu"))
    assert 1e-12 < found.copy < 1e-7  # between ten terabytes and ten megabytes per second
    assert 0 <= found.fresh < 1e-6
    assert found.unit + found.shard > 1e-6  # Python does something for each
    assert max(found.hook, found.unit, found.shard) < 1.0
