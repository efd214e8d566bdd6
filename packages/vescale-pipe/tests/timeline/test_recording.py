"""Recording on one rank: threads, processes, errors, files, and the ring that is full."""

import os
import threading
from pathlib import Path

import pytest

from vescale_pipe import timeline
from vescale_pipe._plugin import vescale_timeline
from vescale_pipe._timeline import recording
from vescale_pipe._timeline.rank_file import read_file
from vescale_pipe.errors import PipeError


def test_spans_nest_and_have_tags() -> None:
    with timeline.record() as recorded:
        timeline.step(3)
        with timeline.span("data", "outer", rows=8), timeline.span("data", "inner"):
            pass
    outer, inner = recorded.spans
    assert (outer.category, outer.name, outer.tags, outer.step) == ("data", "outer", {"rows": 8}, 3)
    assert inner.name == "inner"
    assert 0 <= outer.start <= inner.start <= inner.end <= outer.end
    assert outer.track == inner.track
    assert (recorded.dropped, recorded.unfinished) == (0, [])


def test_nothing_is_recorded_before_and_after() -> None:
    recorder = vescale_timeline()
    assert recorder.begin("a", "before") is None
    recorder.end(None)
    with timeline.span("a", "before"):
        first = timeline.start()
    early = recorder.begin("a", "early")
    timeline.stop()
    recorder.end(early)
    with timeline.span("a", "after"):
        pass
    # `span` around the start ended within the recording, but began before it.
    assert [one.name for one in first.spans] == []
    assert first.unfinished == ["early"]
    second = timeline.start()
    recorder.end(early)
    timeline.stop()
    assert second.spans == []


def test_an_exception_ends_its_span_and_goes_on() -> None:
    with pytest.raises(ZeroDivisionError), timeline.record() as recorded, timeline.span("a", "broken", x=1):
        raise ZeroDivisionError
    assert timeline.current() is None
    assert [(one.name, one.tags) for one in recorded.spans] == [("broken", {"x": 1, "error": "ZeroDivisionError"})]


def test_a_span_that_nobody_ends_is_named() -> None:
    with timeline.record() as recorded:
        vescale_timeline().begin("a", "lost")
    assert recorded.spans == []
    assert recorded.unfinished == ["lost"]


def test_threads_have_tracks_and_may_end_the_spans_of_others() -> None:
    recorder = vescale_timeline()
    with timeline.record() as recorded:
        token = recorder.begin("ckpt.save", "step 5")

        def write() -> None:
            with timeline.span("ckpt.write", "chunk"):
                pass
            recorder.end(token)

        thread = threading.Thread(target=write, name="writer")
        thread.start()
        thread.join()
    save, chunk = recorded.spans
    assert (save.name, chunk.name) == ("step 5", "chunk")
    assert save.track != chunk.track
    tracks = recorded.data().tracks
    assert (tracks[save.track], tracks[chunk.track]) == (threading.current_thread().name, "writer")
    assert save.end >= chunk.end


def test_no_span_of_many_threads_is_lost() -> None:
    with timeline.record(capacity=1 << 13) as recorded:

        def work(number: int) -> None:
            for place in range(500):
                with timeline.span("work", f"{number}.{place}"):
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len({one.name for one in recorded.spans}) == 4000
    assert len({one.track for one in recorded.spans}) == 8
    assert recorded.dropped == 0


def test_a_full_ring_drops_the_oldest_and_says_how_many() -> None:
    with timeline.record(capacity=8) as recorded:
        for number in range(20):
            with timeline.span("a", str(number)):
                pass
    assert [one.name for one in recorded.spans] == [str(number) for number in range(12, 20)]
    assert recorded.dropped == 12
    assert timeline.merge([recorded]).notes[0].startswith("rank 0: 12 spans were dropped, the oldest first")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_records_nothing_and_leaves_the_file_alone(tmp_path: Path) -> None:
    with timeline.record(path=tmp_path / "it", flush_seconds=100) as recorded:
        with timeline.span("a", "parent"):
            pass
        child = os.fork()
        if child == 0:
            right = not timeline.recorder.on and timeline.current() is None
            with timeline.span("a", "child"):
                pass
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert [one.name for one in recorded.spans] == ["parent"]
    assert read_file(tmp_path / "it").complete


def test_only_one_recording_runs() -> None:
    timeline.start()
    with pytest.raises(PipeError, match="runs already"):
        timeline.start()
    timeline.stop()
    with pytest.raises(PipeError, match="no recording runs"):
        timeline.stop()


def test_a_file_grows_while_the_rank_runs(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "rank {rank}"
    with timeline.record(path=path, flush_seconds=100) as recorded:
        with timeline.span("a", "first"):
            pass
        recorded.flush()
        early = read_file(tmp_path / "deeper" / "rank 0")
        assert [one.name for one in early.spans] == ["first"]
        assert not early.complete
        with timeline.span("a", "second"):
            pass
    late = read_file(tmp_path / "deeper" / "rank 0")
    assert [one.name for one in late.spans] == ["first", "second"]
    assert late.complete
    assert recorded.save(tmp_path) == tmp_path / "timeline.0.jsonl"
    assert read_file(tmp_path / "timeline.0.jsonl").spans == late.spans
    # Saved onto itself, it stays.
    recorded.save(tmp_path / "deeper" / "rank {rank}")
    assert read_file(tmp_path / "deeper" / "rank 0").spans == late.spans


def test_a_file_of_a_thread_keeps_up_with_a_small_ring(tmp_path: Path) -> None:
    flushed = threading.Event()
    with timeline.record(path=tmp_path / "it", capacity=64, flush_seconds=0.001) as recorded:
        flush = recorded.flush

        def tell() -> None:
            flush()
            flushed.set()

        recorded.flush = tell  # type: ignore[method-assign]
        for number in range(40):
            for place in range(20):
                with timeline.span("a", f"{number}.{place}"):
                    pass
            flushed.clear()
            assert flushed.wait(10)
    assert len(recorded.spans) == 800
    assert recorded.dropped == 0


def test_a_disk_that_is_full_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = timeline.start(path=tmp_path / "it", flush_seconds=100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vescale_pipe._timeline.recording.write_lines", full)
    with timeline.span("a", "b"):
        pass
    recorded.flush()
    with pytest.raises(OSError, match="No space left"):
        timeline.stop()
    assert timeline.current() is None


def test_tags_that_json_does_not_know_are_text(tmp_path: Path) -> None:
    with timeline.record() as recorded, timeline.span("a", "b", where=Path("x")):
        pass
    assert read_file(recorded.save(tmp_path / "it")).spans[0].tags == {"where": "x"}


def test_a_file_is_ended_with_its_process(tmp_path: Path) -> None:
    timeline.start(path=tmp_path / "it", flush_seconds=100)
    with timeline.span("a", "b"):
        pass
    recording._at_exit()
    assert timeline.current() is None
    read = read_file(tmp_path / "it")
    assert (read.complete, len(read.spans)) == (True, 1)
    timeline.start()
    recording._at_exit()  # what is only in memory is not fetched for nobody
    assert timeline.current() is not None


def test_a_recording_that_could_not_read_clocks_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: timeline.Timeline, pings: int = 1) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(recording, "clock_ranks", lambda mesh, group: (group, [0, 1]))
    monkeypatch.setattr(timeline.Timeline, "sync", fail)
    with pytest.raises(RuntimeError, match="Connection closed"):
        timeline.start(path=tmp_path / "it")
    assert timeline.current() is None
    assert not timeline.recorder.on
    monkeypatch.undo()
    # What was recorded stays if clocks cannot be read at the end.
    recorded = timeline.start(path=tmp_path / "it")
    monkeypatch.setattr(recorded, "_clocks", (None, [0, 1]))
    monkeypatch.setattr(timeline.Timeline, "sync", fail)
    with timeline.span("a", "b"):
        pass
    with pytest.raises(RuntimeError, match="Connection closed"):
        timeline.stop()
    assert [span.name for span in recorded.spans] == ["b"]
    assert read_file(tmp_path / "it").complete


def test_actions_have_the_names_of_the_schedule() -> None:
    with timeline.record() as recorded:
        now = recorded.data().origin
        timeline.recorder.action(2, 3, 7, now + 10, now + 30)
    (span,) = recorded.spans
    assert (span.name, span.category, span.start, span.end) == ("3I7", "compute", 10, 30)
    assert span.tags == {"kind": "I", "stage": 3, "microbatch": 7}
    assert span.is_action


def test_the_hook_gives_a_recorder_for_good() -> None:
    recorder = vescale_timeline()
    assert recorder is timeline.recorder
    with timeline.record() as recorded:
        recorder.end(recorder.begin("communication", "all_reduce"))
    assert [(one.category, one.name) for one in recorded.spans] == [("communication", "all_reduce")]
