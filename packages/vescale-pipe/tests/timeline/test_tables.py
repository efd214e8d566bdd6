"""Summaries name what takes time."""

from collections.abc import Callable
from pathlib import Path

from vescale_pipe import timeline
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import Span

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]


def test_a_summary_has_times_by_rank_and_by_name(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    million = 1_000_000
    tags = {"kind": "F", "stage": 0, "microbatch": 0}
    write(
        tmp_path,
        rank_of(
            0,
            [
                Span(0, 60 * million, "compute", "0F0", 0, 0, tags),
                Span(50 * million, 100 * million, "ckpt.save", "write", 0, 4),
                Span(70 * million, 90 * million, "ckpt.save", "write", 0, 5),
            ],
            pp=0,
        ),
    )
    write(tmp_path, rank_of(1, [Span(0, 25 * million, "compute", "0F0", 0, 0, tags)], pp=1))
    lines = timeline.summary(timeline.merge(tmp_path)).splitlines()
    assert lines[0] == "2 ranks, 4 spans, 1 steps, 100 ms; 0 messages with both ends"
    table = [line.split("  ") for line in lines]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in table]
    assert cells[2] == ["rank", "ckpt.save", "compute", "clock within"]
    # What overlaps counts once: the two writes make 50 ms.
    assert cells[3] == ["rank 0 (pp=0)", "50 ms 50%", "60 ms 60%", "(reference)"]
    assert cells[4] == ["rank 1 (pp=1)", "-", "25 ms 25%", "1 ns"]
    assert cells[7] == ["compute: F of stage 0", "2", "85 ms", "42.5 ms", "60 ms"]
    assert cells[8] == ["ckpt.save: write", "2", "70 ms", "35 ms", "50 ms"]


def test_of_messages_the_waiting_counts(
    tmp_path: Path, write: Write, rank_of: MakeRank, message: Callable[..., Span]
) -> None:
    million = 1_000_000
    write(tmp_path, rank_of(0, [message("recv", 1, 0, 0, 100 * million, blocked=30 * million)]))
    lines = timeline.summary(timeline.merge(tmp_path)).splitlines()
    assert lines[2].split() == ["rank", "wait", "for", "messages", "clock", "within"]
    assert lines[3].split() == ["rank", "0", "30", "ms", "30%", "(reference)"]
