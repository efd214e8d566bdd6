"""Spans on a GPU, with events that tell times of a made-up one."""

from time import perf_counter_ns

import pytest

from vescale_pipe import timeline
from vescale_pipe._timeline.device import DeviceSpans
from vescale_pipe._timeline.recorder import Recorder
from vescale_pipe._timeline.ring import Raw


class Gpu:
    """A clock, and events that are recorded when it shows a time and done when it has passed on."""

    def __init__(self) -> None:
        self.now = 0.0  # milliseconds
        self.made = 0
        self.done_until = 0.0

    def event(self) -> "Event":
        self.made += 1
        return Event(self)

    def anchor(self) -> "Event":
        event = Event(self)
        event.record()
        return event


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.time = -1.0

    def record(self) -> None:
        self.time = self.gpu.now

    def query(self) -> bool:
        return self.time <= self.gpu.done_until

    def synchronize(self) -> None:
        self.gpu.done_until = max(self.gpu.done_until, self.time)

    def elapsed_time(self, other: "Event") -> float:
        assert self.query()
        return other.time - self.time


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def spans_on(gpu: Gpu, capacity: int = 8) -> DeviceSpans:
    return DeviceSpans(Recorder(), "made up", capacity, gpu.event, gpu.anchor)


def lengths(raw: list[Raw]) -> list[tuple[str | None, int]]:
    return [(token[2], end - token[6]) for token, end in raw]


def test_times_are_those_of_the_host_when_the_gpu_did_it(gpu: Gpu) -> None:
    spans = spans_on(gpu)
    token = spans.begin("compute", "matmul", {"x": 1})
    gpu.now = 2.5
    spans.end(token)
    gpu.now = gpu.done_until = 10.0
    before = perf_counter_ns()
    ((found, end),) = spans.resolve()
    after = perf_counter_ns()
    # It ended 7.5 ms before the anchor, which happened just now.
    assert before - 7_500_000 <= end <= after - 7_500_000
    assert end - found[6] == 2_500_000
    assert found[1:3] == ("compute", "matmul")
    assert found[5] == {"x": 1}


def test_what_the_gpu_has_not_ended_comes_later(gpu: Gpu) -> None:
    spans = spans_on(gpu)
    for name in ("first", "second"):
        token = spans.begin("a", name)
        gpu.now += 1.0
        spans.end(token)
    gpu.done_until = 1.0
    assert lengths(spans.resolve()) == [("first", 1_000_000)]
    assert spans.resolve() == []
    assert lengths(spans.resolve(wait=True)) == [("second", 1_000_000)]


def test_events_are_used_again(gpu: Gpu) -> None:
    spans = spans_on(gpu)
    for _ in range(20):
        token = spans.begin("a", "b")
        gpu.now += 1.0
        spans.end(token)
        spans.resolve(wait=True)
    assert gpu.made == 2


def test_the_oldest_are_dropped_if_nobody_fetches_them(gpu: Gpu) -> None:
    spans = spans_on(gpu, capacity=3)
    for number in range(5):
        token = spans.begin("a", str(number))
        gpu.now += 1.0
        spans.end(token)
    assert [name for name, _ in lengths(spans.resolve(wait=True))] == ["2", "3", "4"]
    assert spans.dropped == 2


def test_a_recording_with_a_gpu_has_a_track_for_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSpans, "_cuda_event", lambda self: gpu.event())
    monkeypatch.setattr(DeviceSpans, "_cuda_anchor", lambda self: gpu.anchor())
    with timeline.record(device="made up") as recorded:
        with timeline.span("host", "launch"), timeline.device_span("device", "kernel", rows=3):
            gpu.now += 0.0001
        with pytest.raises(ZeroDivisionError), timeline.device_span("device", "broken"):
            raise ZeroDivisionError
    found = {span.name: span for span in recorded.spans}
    assert found["kernel"].length == 100
    assert found["kernel"].tags == {"rows": 3}
    assert found["broken"].tags == {"error": "ZeroDivisionError"}
    tracks = recorded.data().tracks
    assert tracks[found["kernel"].track] == "GPU made up"
    assert found["launch"].track != found["kernel"].track
    assert recorded.dropped == 0


def test_without_a_gpu_it_is_a_span_of_the_host() -> None:
    with timeline.record() as recorded, timeline.device_span("a", "b"):
        pass
    assert [span.name for span in recorded.spans] == ["b"]
    with timeline.device_span("a", "nothing runs"):
        pass
