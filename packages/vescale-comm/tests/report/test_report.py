"""What a report sees of real training steps, and what it makes of known times."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from vescale_comm import DistributedOptimizer, fully_shard, replicate
from vescale_comm._mesh import reduce_over
from vescale_comm._report import CommReport, comm_report
from vescale_comm._report import watch as watching
from vescale_comm._report.watch import Event
from vescale_testing import cached_mesh


def test_rows_of_known_times():
    report = CommReport()
    report.begun, report.steps, report.ended = 0.0, [10.0, 20.0], 30.0
    report.events += [
        Event("all_reduce", "w", 8_000_000, 5.0, 6.0, 7.0),  # before the first step
        Event("all_reduce", "w", 8_000_000, 11.0, 13.0, 14.0),
        Event("all_gather", "v", 4_000_000, 12.0, 12.0, 16.0),
        Event("all_reduce", "w", 8_000_000, 22.0, 25.0, 29.0),
        Event("all_gather", "v", 4_000_000, 23.0),  # goes on
    ]
    reduced, gathered = report.rows
    assert (reduced.operation, reduced.name, reduced.nbytes, reduced.calls) == ("all_reduce", "w", 8_000_000, 1.0)
    assert (reduced.start, reduced.under_way, reduced.exposed, reduced.hidden) == (1.5, 5.0, 2.5, 0.5)
    assert (gathered.calls, gathered.under_way, gathered.exposed, gathered.hidden) == (0.5, 2.0, 2.0, 0.0)
    assert (report.num_steps, report.seconds, report.exposed, report.nbytes) == (2, 10.0, 4.5, 10e6)
    head, first, second, last = str(report).splitlines()
    assert head.split()[:2] == ["operation", "MB"]
    assert first.split() == ["all_reduce", "8.00", "1", "1500.00", "5000.00", "2500.00", "50%", "w"]
    assert second.split()[-2:] == ["0%", "v"]
    assert last == "2 step(s) of 10000.00 ms: 10.00 MB, 4500.00 ms (45.0%) exposed"
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["hidden"] == 0.5


class Recorder:
    """A timeline."""

    def __init__(self):
        self.open, self.closed = [], []

    def begin(self, category, name):
        self.open.append((category, name))
        return name

    def end(self, token):
        self.closed.append(token)


@pytest.mark.ranks(2)
def test_training_steps(rank, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(watching, "_timeline", lambda: recorder)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    plain, sharded, cut = replicate(model()), model(), fully_shard(model(), units=["1"])
    zero = DistributedOptimizer(sharded, torch.optim.SGD, lr=0.1)
    x = torch.ones(3, 4)

    def step():
        for net in (plain, sharded, cut):
            net(x).sum().backward()
        zero.step()
        zero.finish_param_sync()
        reduce_over(torch.ones(5), cached_mesh(2, names=("dp",)), "dp")

    step()
    with comm_report() as report:
        for _ in range(2):
            report.step()
            step()
    step()
    numel = sum(p.numel() for p in model().parameters())
    rows = {(row.operation, row.name): row for row in report.rows}
    assert all(row.under_way >= row.exposed > 0 and row.start > 0 for row in report.rows)
    assert rows["all_reduce", "2.bias ... 0.weight (6)"].calls == 1.0
    of_zero = [row for row in report.rows if row.name.endswith("(6)") and row.operation != "all_reduce"]
    assert [row.operation for row in of_zero] == ["reduce_scatter", "all_gather"]
    assert all(row.calls == 1.0 and row.nbytes >= 4 * numel for row in of_zero)
    # fully_shard: gathered for forward and backward, where it is given back in between.
    assert rows["all_gather", "1.weight ... 1.bias (2)"].calls >= 1.0
    assert rows["reduce_scatter", "1.weight ... 1.bias (2)"].nbytes >= 4 * (8 * 8 + 8)
    assert rows["sum", "1 tensor(s) over dp"].nbytes == 20
    assert report.exposed < report.seconds
    spans = [name for category, name in recorder.open if category == "comm"]
    assert spans.count("sum 1 tensor(s) over dp") == 4
    assert spans.count("reduce_scatter 1.weight ... 1.bias (2)") == 4
    assert sorted(recorder.closed) == sorted(spans)


class Broken:
    """A collective that fails."""

    def wait(self):
        raise RuntimeError("gone")


def test_nobody_looks_without_a_report(monkeypatch):
    monkeypatch.setattr(watching, "_timeline", lambda: None)
    work = Broken()
    assert watching.watch(work, "all_reduce", lambda: 1 / 0, 8) is work
    with comm_report() as report:
        watched = watching.watch(work, "all_reduce", lambda: "w", 8)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gone"):
                watched.wait()
    assert [row.name for row in report.rows] == ["w"]
    assert watching.watch(work, "all_reduce", lambda: 1 / 0, 8) is work
