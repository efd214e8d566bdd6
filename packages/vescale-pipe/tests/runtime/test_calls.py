"""The flat list of calls: what is in flight, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.rank import Rank
from vescale_pipe._schedule import Kind
from vescale_pipe._split import manual
from vescale_pipe._transport import LocalHub, LocalTransport


class Watched(LocalTransport):
    """Counts messages that are asked for and not taken, and sends that are not let go."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.asked = self.most_asked = self.open = self.most_open = 0
        self.draining = False

    def recv(self, src: int, tag: int) -> Any:
        inner = super().recv(src, tag)
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        owner = self

        class Counted:
            def ready(self) -> bool:
                return inner.ready()

            def wait(self) -> list[Any]:
                owner.asked -= 1
                return inner.wait()

        return Counted()

    def send(self, dst: int, tag: int, values: Any) -> Any:
        super().send(dst, tag, values)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        key = (self.rank, dst, tag)
        owner = self

        class Counted:
            def wait(self) -> None:
                # Before the end of the step, only what has arrived is waited for: nothing may block.
                assert owner.draining or key not in owner.hub.boxes
                owner.open -= 1

        return Counted()


def acted(
    monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int, count: int, **plan: Any
) -> tuple[PipeEngine, list[Watched]]:
    made: list[Watched] = []

    def transport(self: LocalHub, rank: int) -> Watched:
        made.append(Watched(self, rank))
        return made[-1]

    drain = Rank.drain

    def draining(self: Rank) -> None:
        self.transport.draining = True
        drain(self)

    monkeypatch.setattr(LocalHub, "transport", transport)
    monkeypatch.setattr(Rank, "drain", draining)
    count_stages = 2 * ranks if schedule in ("interleaved_1f1b", "zb_v", "dualpipe_v") else ranks
    graph = manual([nn.Linear(3, 3) for _ in range(count_stages)])
    engine = PipeEngine(
        graph,
        None,
        PipePlan(schedule=schedule, num_microbatches=count, **plan),
        functional.mse_loss,
        act_out=ranks,
        loss_everywhere=False,
    )
    return engine, made


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_few_messages_are_in_flight(monkeypatch: pytest.MonkeyPatch, schedule: str, ahead: int) -> None:
    """Room for `receive_ahead` messages however many micro-batches there are; sends are let go on the way."""
    most_open = []
    for count in (16, 32):
        engine, transports = acted(monkeypatch, schedule, 4, count, receive_ahead=ahead)
        engine(torch.randn(count, 3), target=torch.randn(count, 3))
        assert all(one.most_asked <= ahead for one in transports)
        assert all(one.asked == one.open == 0 for one in transports)
        assert not transports[0].hub.boxes
        most_open.append(max(one.most_open for one in transports))
    if schedule != "gpipe":  # all forwards leave before the first gradient comes
        assert most_open[0] == most_open[1] < 20


def test_the_list_follows_the_schedule_with_messages_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = acted(monkeypatch, "1f1b", 2, 2)
    form = next(iter(engine._forms.made.values()))
    first, last = form.calls(True, 2)
    names = [" ".join(one.name.replace(" ", "-") for one in calls.calls) for calls in (first, last)]
    assert names[0] == "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 the-end-of-sends"
    assert names[1] == ("1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 the-loss the-end-of-sends")
    assert [one.ready is not None for one in first.calls] == [False] * 4 + [True, False, True, False, False]
    forwards = form.calls(False, 3)[1]
    assert [one.name for one in forwards.calls][:4] == ["1RECV_F0<0", "1F0", "1RECV_F1<0", "1F1"]
    assert not {tag for _, tag in forwards.receives} & {tag for _, tag in last.receives}


@pytest.mark.parametrize("ranks", [None, 2])
def test_computations_are_recorded(ranks: int | None) -> None:
    graph = manual([nn.Linear(3, 3), nn.Linear(3, 3)])
    engine = PipeEngine(graph, None, PipePlan(num_microbatches=2), functional.mse_loss, act_out=ranks)
    seen: list[tuple[Kind, int, int]] = []
    times: list[int] = []

    def record(kind: Kind, stage: int, microbatch: int, start: int, end: int) -> None:
        seen.append((kind, stage, microbatch))
        times.extend((start, end))

    engine.record = record
    engine(torch.randn(4, 3), target=torch.randn(4, 3))
    names = [f"{stage}{kind.name}{m}" for kind, stage, m in seen]
    order = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1".split()
    assert sorted(names) == sorted(order)
    if ranks is None:
        assert names == order
    assert times == sorted(times)
