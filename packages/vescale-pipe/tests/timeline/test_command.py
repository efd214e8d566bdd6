"""`python -m vescale_pipe timeline`."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vescale_pipe.__main__ import main
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import Span

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]


@pytest.fixture
def folder(tmp_path: Path, write: Write, rank_of: MakeRank) -> Path:
    for rank in range(2):
        spans = [
            Span(place * 1000, place * 1000 + 900, "compute", f"{rank}{kind}0", 0, 0, tags)
            for place, kind in ((rank, "F"), (3 - rank, "B"))
            for tags in [{"kind": kind, "stage": rank, "microbatch": 0}]
        ]
        write(tmp_path, rank_of(rank, spans, pp=rank))
    return tmp_path


def test_merge_writes_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "out.json.gz"
    assert main(["timeline", "merge", str(folder), "-o", str(output)]) == 0
    trace = json.loads(gzip.decompress(output.read_bytes()))
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"0F0", "0B0", "1F0", "1B0"}
    assert capsys.readouterr().out == f"{output}: 2 ranks, 4 spans, 0 messages\n"


def test_summary_has_a_report_if_there_is_a_schedule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "summary", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, 4 spans" in text
    assert "no rank is a straggler" in text


def test_plot_draws_to_the_screen_or_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / f"timeline.{rank}.jsonl") for rank in range(2)]
    assert main(["timeline", "plot", *files]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 0, as measured\n")
    assert "F0" in text
    output = folder / "out.svg"
    assert main(["timeline", "plot", *files, "-o", str(output)]) == 0
    assert output.read_text().startswith("<svg")


def test_mistakes_are_told_without_a_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "plot", str(folder), "--step", "7"]) == 1
    assert "step: 7" in capsys.readouterr().err
    assert main(["timeline", "summary", str(folder / "missing")]) == 1
    assert "missing" in capsys.readouterr().err


def test_report_of_all_ranks_and_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("no rank is a straggler\n")
    assert "rank 0 (pp=0)" in text
    assert "rank 1 (pp=1)" in text
    assert main(["timeline", "report", str(folder), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert "rank 0 (pp=0)" not in text
    assert "rank 1 (pp=1)" in text
    assert main(["timeline", "report", str(folder), "--rank", "7"]) == 1
    assert capsys.readouterr().err == "rank: 7 given; the timeline has ranks 0, 1.\n"
    # The file of one rank alone: no pipeline can be simulated, and the rest is told.
    assert main(["timeline", "report", str(folder / "timeline.1.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "rank 1 (pp=1)" in text
    assert "note: no step is whole" in text


def test_an_axis_that_is_not_there_lists_those_that_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("report", "summary"):
        assert main(["timeline", action, str(folder), "--axis", "pipe"]) == 1
        assert capsys.readouterr().err == "axis: 'pipe' given; the mesh of this timeline has pp.\n"
        assert main(["timeline", action, str(folder), "--axis", "pp"]) == 0
        assert "no rank is a straggler" in capsys.readouterr().out


@pytest.mark.parametrize(("axes", "works"), [(["stage"], True), (["a", "b"], False), ([], True)])
def test_without_an_axis_it_is_pp_or_the_only_one(
    tmp_path: Path,
    write: Write,
    rank_of: MakeRank,
    capsys: pytest.CaptureFixture[str],
    axes: list[str],
    works: bool,
) -> None:
    for rank in range(2):
        spans = [
            Span(place * 1000, place * 1000 + 900, "compute", f"{rank}{kind}0", 0, 0, tags)
            for place, kind in ((rank, "F"), (3 - rank, "B"))
            for tags in [{"kind": kind, "stage": rank, "microbatch": 0}]
        ]
        write(tmp_path, rank_of(rank, spans, **dict.fromkeys(axes, rank)))
    assert main(["timeline", "report", str(tmp_path)]) == (0 if works else 1)
    found = capsys.readouterr()
    assert (
        "no rank is a straggler" in found.out
        if works
        else "axis: the mesh of this timeline has a, b, none" in found.err
    )
    assert main(["timeline", "summary", str(tmp_path)]) == 0
    assert ("note: no report, axis: the mesh" in capsys.readouterr().out) != works
