"""Bars of timelines without a schedule."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vescale_pipe import timeline
from vescale_pipe._draw import render
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import Span

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]
MakeMessage = Callable[..., Span]


def test_what_lies_in_other_spans_is_left_out(
    tmp_path: Path, write: Write, rank_of: MakeRank, message: MakeMessage
) -> None:
    some = [Span(10, 50, "a", "outer"), Span(20, 30, "a", "inner"), Span(60, 90, "a", "next")]
    write(tmp_path, rank_of(0, [*some, message("send", 1, 0, 20, 30)]))
    merged = timeline.merge(tmp_path)
    bars = timeline.bars(merged)
    assert [(bar.label, bar.kind) for bar in bars] == [("outer", "other"), ("message 0", "message"), ("next", "other")]
    assert [(bar.start, bar.end) for bar in bars] == [(0, 4e-8), (1e-8, 2e-8), (5e-8, 8e-8)]
    assert "rank 0" in render(bars, format="text")


def test_an_empty_timeline_has_no_bars(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    write(tmp_path, rank_of(0, []))
    merged = timeline.merge(tmp_path)
    assert timeline.bars(merged) == []
    with pytest.raises(ValueError, match="step: 1 given, which is not in the timeline; it has no spans"):
        timeline.bars(merged, 1)
