"""The culprit is named: synthetic runs, made by a simulation on paper, with one slow rank, axis or link."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from vescale_pipe import timeline
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import Span

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]
MakeMessage = Callable[..., Span]
Run = Callable[..., timeline.Merged]

PP, M, STEPS = 4, 6, 5
FORWARD, BACKWARD = 1_000_000, 2_000_000


def one_f_one_b(place: int) -> list[tuple[str, int]]:
    """Return what a rank of 1F1B does."""
    warm = min(PP - place, M)
    order = [("F", m) for m in range(warm)]
    for m in range(M):
        order.append(("B", m))
        if warm + m < M:
            order.append(("F", warm + m))
    return order


def run_times(
    factor: Callable[[int, int], float], latency: Callable[[int, int], int]
) -> tuple[list[list[Span]], list[list[Span]], list[int]]:
    """Play 1F1B through, step by step: actions and messages of each place, and the length of each step."""
    actions: list[list[Span]] = [[] for _ in range(PP)]
    messages: list[list[Span]] = [[] for _ in range(PP)]
    lengths, now = [], 0
    for step in range(STEPS):
        done: dict[tuple[str, int, int], int] = {}
        at, clock = [0] * PP, [now] * PP
        orders = [one_f_one_b(place) for place in range(PP)]
        while any(at[place] < len(orders[place]) for place in range(PP)):
            for place in range(PP):
                if at[place] == len(orders[place]):
                    continue
                kind, m = orders[place][at[place]]
                source = place - 1 if kind == "F" else place + 1
                start = clock[place]
                if 0 <= source < PP:
                    if (kind, source, m) not in done:
                        continue
                    sent = done[kind, source, m]
                    came = sent + latency(source, place)
                    blocked = max(0, came - start)
                    tags = {"key": f"{kind}{m}", "blocked": blocked}
                    messages[source].append(
                        Span(sent, came, "message", "m", step, -1, {**tags, "direction": "send", "peer": place})
                    )
                    messages[place].append(
                        Span(
                            sent - 100,
                            max(start, came),
                            "message",
                            "m",
                            step,
                            -1,
                            {**tags, "direction": "recv", "peer": source},
                        )
                    )
                    start = max(start, came)
                end = start + int((FORWARD if kind == "F" else BACKWARD) * factor(place, step))
                tags = {"kind": kind, "stage": place, "microbatch": m}
                actions[place].append(Span(start, end, "compute", f"{place}{kind}{m}", step, 0, tags))
                done[kind, place, m] = clock[place] = end
                at[place] += 1
        lengths.append(max(clock) - now)
        now = max(clock) + 1000
    return actions, messages, lengths


@pytest.fixture
def run(tmp_path: Path, write: Write, rank_of: MakeRank) -> Run:
    """Record a mesh of PP x dp ranks; peers of messages are of the same pipeline."""

    def make(
        factor: Callable[[int, int, int], float],
        latency: Callable[[int, int], int] = lambda src, dst: 10_000,
        dp: int = 1,
    ) -> timeline.Merged:
        for replica in range(dp):

            def here(place: int, step: int, replica: int = replica) -> float:
                return factor(place, replica, step)

            actions, messages, _ = run_times(here, latency)
            for place in range(PP):
                moved = []
                for span in messages[place]:
                    tags = {**span.tags, "peer": span.tags["peer"] * dp + replica}
                    moved.append(replace(span, tags=tags))
                write(tmp_path, rank_of(place * dp + replica, [*actions[place], *moved], pp=place, dp=replica))
        return timeline.merge(tmp_path)

    return make


@pytest.mark.parametrize("culprit", range(PP))
def test_a_slow_rank_is_named_among_its_peers(run: Run, culprit: int) -> None:
    """What it costs is the difference of two runs, with it and without."""
    report = timeline.report(run(lambda place, replica, step: 1.5 if (place, replica) == (culprit, 1) else 1.0, dp=3))
    worst = report.ranks[0]
    assert (worst.rank, dict(worst.coordinates)) == (culprit * 3 + 1, {"pp": culprit, "dp": 1})
    assert worst.slowdown == pytest.approx(1.5)
    assert worst.excess == pytest.approx(0.5 * M * (FORWARD + BACKWARD) / 1e9)
    assert worst.compared == "peers"
    assert [one.rank for one in report.stragglers] == [worst.rank]
    slow = run_times(lambda place, step: 1.5 if place == culprit else 1.0, lambda src, dst: 10_000)[2]
    fast = run_times(lambda place, step: 1.0, lambda src, dst: 10_000)[2]
    assert worst.blame == pytest.approx((sum(slow) - sum(fast)) / STEPS / 1e9, rel=0.02)
    assert all(abs(one.blame or 0) < 1e-6 for one in report.ranks[1:])
    assert report.axes == {"pp": culprit, "dp": 1}
    text = str(report).splitlines()[0]
    assert text.startswith(f"rank {worst.rank} (pp={culprit}, dp=1) takes 1.50 times what it should and costs")


def test_without_peers_other_stages_are_the_measure(run: Run) -> None:
    report = timeline.report(run(lambda place, replica, step: 1.4 if place == 2 else 1.0))
    assert [one.rank for one in report.stragglers] == [2]
    assert report.ranks[0].compared == "stages"
    assert (report.ranks[0].blame or 0) > 0
    assert "the stage may just be larger" in str(report)


def test_an_axis_is_named_if_all_of_its_place_are_slow(run: Run) -> None:
    report = timeline.report(run(lambda place, replica, step: 1.3 if replica == 2 else 1.0, dp=3))
    assert sorted(one.rank for one in report.stragglers) == [2, 5, 8, 11]
    assert report.axes == {"dp": 2}
    assert "4 ranks are slow: 2, 5, 8, 11, all those with dp=2" in str(report)


def test_slow_ranks_without_a_common_place_are_no_axis(run: Run) -> None:
    slow = {(0, 0), (1, 2)}
    report = timeline.report(run(lambda place, replica, step: 1.3 if (place, replica) in slow else 1.0, dp=3))
    assert sorted(one.rank for one in report.stragglers) == [0, 5]
    assert report.axes is None


def test_even_ranks_are_no_stragglers(run: Run) -> None:
    report = timeline.report(run(lambda place, replica, step: 1.0 + 0.02 * replica, dp=2))
    assert report.stragglers == ()
    assert str(report).startswith("no rank is a straggler")
    lengths = run_times(lambda place, step: 1.02, lambda src, dst: 10_000)[2]
    # The pipelines do not wait for each other here, so only the first step begins at one time.
    assert report.steps[0] == pytest.approx(lengths[0] / 1e9)
    assert len(report.steps) == STEPS


def test_bubbles_are_those_of_the_paper(run: Run) -> None:
    report = timeline.report(run(lambda place, replica, step: 1.0, lambda src, dst: 0))
    expected = (PP - 1) / (M + PP - 1)
    assert report.paper_bubble == pytest.approx(expected)
    assert report.usual_bubble == pytest.approx(expected)
    assert report.bubble == pytest.approx(expected)
    slow = timeline.report(run(lambda place, replica, step: 1.0, lambda src, dst: 500_000))
    assert slow.usual_bubble == pytest.approx(expected)
    assert (slow.bubble or 0) > expected + 0.05


def test_a_slow_link_is_named(run: Run) -> None:
    report = timeline.report(
        run(lambda place, replica, step: 1.0, lambda src, dst: 800_000 if (src, dst) == (2, 1) else 10_000)
    )
    link = report.links[0]
    assert (link.src, link.dst) == (2, 1)
    assert link.messages == M * STEPS
    # It counts from when the receiver had nothing else to do.
    assert link.median == pytest.approx(800_000 / 1e9, rel=0.02)
    assert report.links[1].median < 1e-4
    assert report.stragglers == ()


def test_a_rank_that_gets_slower_shows_a_trend(run: Run) -> None:
    report = timeline.report(run(lambda place, replica, step: 1.0 + 0.25 * step * (place == 1 and replica == 1), dp=2))
    trends = {one.rank: one.trend for one in report.ranks}
    assert trends[3] == pytest.approx(2.0)
    assert trends[2] == pytest.approx(1.0)


def test_a_step_of_which_something_was_dropped_has_no_blame(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    actions, _, _ = run_times(lambda place, step: 2.0 if place == 3 else 1.0, lambda src, dst: 0)
    for place in range(PP):
        # The first forwards of the first rank are lost in all steps.
        kept = [s for s in actions[place] if place or s.tags["microbatch"] or s.tags["kind"] == "B"]
        write(tmp_path, rank_of(place, kept))
    report = timeline.report(tmp_path)
    assert report.ranks[0].rank == 3
    assert {one.blame for one in report.ranks} == {None}
    assert any("no step is whole" in note for note in report.notes)
    assert "rank 3 takes 2.00 times" in str(report)


def test_without_actions_there_is_nothing_to_compare(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    write(tmp_path, rank_of(0, [Span(0, 5, "data", "load")]))
    with pytest.raises(ValueError, match="no actions"):
        timeline.report(tmp_path)


def order_of(bars: Sequence[object]) -> list[str]:
    return [getattr(bar, "name", "") for bar in bars]


def test_a_measured_step_is_drawn_as_it_was(run: Run) -> None:
    merged = run(lambda place, replica, step: 1.0 + step, dp=2)
    bars = merged.bars(1)
    assert {bar.rank for bar in bars} == set(range(8))
    first = [bar for bar in bars if bar.rank == 0]
    assert order_of(first) == [f"0{kind}{m}" for kind, m in one_f_one_b(0)]
    assert (first[0].start, first[0].end) == (0, pytest.approx(2 * FORWARD / 1e9))
    assert (first[0].label, first[0].kind) == ("0", "F")
    # By default the last whole step.
    assert merged.bars()[0].end == pytest.approx(STEPS * FORWARD / 1e9)
    with pytest.raises(ValueError, match="step: 9"):
        merged.bars(9)
