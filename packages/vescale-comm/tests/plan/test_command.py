"""Plans on the command line: one explained, several as a table, and what is refused."""

import re
from pathlib import Path

import pytest

from vescale_comm.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_one_world_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "llama-3-8b", "--world", "64", "--block", "32x32")
    assert status == 0
    assert "8030261248 elements over 64 ranks: padding " in out
    assert re.search(r"layers\.31.*\n  \d+ tensors, shard \d+, ", out)


def test_worlds_are_compared_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"u": {"u.w": [10, 6], "u.b": [4]}, "v": {"v.w": [10, 6]}}')
    words = ("plan", str(path), "--world", "2,4", "--block", r".*\.w=rows:2", "--group-share", "0")
    status, out, _ = run(capsys, *words)
    head, two, four = (line.split() for line in out.splitlines())
    assert status == 0
    assert head[:7] == ["world", "padding", "even", "Shard(0)", "bound", "largest", "seconds"]
    # Shards of 36 + 36 at 2 ranks, 24 + 24 at 4; even 36 + 2 + 36, 24 + 1 + 24; rows 30 + 2 + 30, 18 + 1 + 18.
    assert two[:5] == ["2", "16.13%", "19.35%", "0.00%", "16.13%"]
    assert four[:5] == ["4", "54.84%", "58.06%", "19.35%", "54.84%"]
    assert "2 groups of 1 units" in out


def test_knobs_and_rules_reach_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama-3-8b", "--world", "1024", "--group-share", "0")
    assert "stored tile by tile" in run(capsys, *words, "--block", "128x128")[1]
    assert "stored" not in run(capsys, *words, "--block", "128x128", "--storage", "given")[1]
    copies = run(capsys, *words, "--block", "rows:128", "--max-replicas", "32", "--target", "0.2")[1]
    assert re.search(r"\d+ copies of \d+ shards", copies)
    whole = run(capsys, *words, "--block", ".*norm.weight=whole", "--block", "7")[1]
    assert "padding 0.00%" in whole


def test_what_is_wrong_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (("llama-3-8b", "--world", "4", "--block", "much"), "'much' is no block: write 128x128"),
        (("llama-3-8b", "--world", "4", "--block", "0x4"), "is no block: it holds 1 element or more"),
        (("llama-3-8b", "--world", "4", "--block", "w9=whole"), "'w9' matches no parameter"),
        (("llama-3-8b", "--world", "4", "--block", "(=whole"), "'(' is no regular expression"),
        ((str(tmp_path / "none.json"), "--world", "4"), "none.json' is no file and no model; models are "),
    ):
        status, out, err = run(capsys, "plan", *words)
        assert (status, out) == (1, "")
        assert text in err
    with pytest.raises(SystemExit):
        main(["plan", "llama-3-8b", "--world", "8,x"])
    assert "expected numbers of ranks" in capsys.readouterr().err
