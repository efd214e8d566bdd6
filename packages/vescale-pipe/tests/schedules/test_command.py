"""Schedules on the command line: what is compared, drawn, checked, and refused."""

from pathlib import Path

import pytest

from vescale_pipe.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "schedules", "--ranks", "4", "--microbatches", "8")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert status == 0
    # F = I = W = 1: (P - 1)(F + B) idle of a makespan of M(F + B) + idle; half of it with two chunks
    assert rows["1f1b"] == ["4", "33", "27.3%", "27.3%", "4"]
    assert rows["interleaved_1f1b"][:3] == ["8", "28.5", "15.8%"]
    assert float(rows["optimized"][1]) <= min(float(row[1]) for row in rows.values())


def test_costs_count_and_what_cannot_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "schedules", "--costs", "2,1,1", "--chunks", "3", "--microbatches", "1", "--ranks", "1"
    )
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert status == 0
    assert rows["interleaved_1f1b"][:2] == ["3", "4"]
    assert "zb_v:" in out


def test_a_schedule_is_drawn_and_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "draw", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert status == 0
    assert "rank 0  F0-F1-.  .  B0----.  B1----" in out
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert run(capsys, "check", str(tmp_path / "own.csv"))[:2] == (
        0,
        f"{tmp_path}/own.csv: 2 ranks, 2 stages, 8 actions, valid\n",
    )
    target = tmp_path / "own.svg"
    assert run(capsys, "draw", str(tmp_path / "own.csv"), "-o", str(target))[:2] == (0, f"{target}\n")
    assert target.read_text().startswith("<svg")


def test_what_is_wrong_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0,0B0\n")
    status, out, err = run(capsys, "check", str(tmp_path / "bad.csv"))
    assert (status, out) == (1, "")
    assert "0B0" in err
    assert run(capsys, "draw", "nonsense")[0] == 1
    assert run(capsys, "draw", str(tmp_path / "none.csv"))[0] == 1
    with pytest.raises(SystemExit):
        main(["schedules", "--costs", "1,2"])
    assert "expected three or four numbers" in capsys.readouterr().err
