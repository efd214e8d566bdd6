"""The commands as a user runs them: what they print, as JSON too, and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import _plugins
from vescale_ckpt._cli import main
from vescale_ckpt._format import Lease, step_folder


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A store with steps 1 and 2."""
    root = tmp_path / "run"
    w = torch.arange(10000.0).reshape(200, 50)
    for step in (1, 2):
        state = {"model": {"w": w, "b": torch.full((1000,), float(step))}, "step": step, "name": "evil\x1b[2J"}
        ck.save(root, state, step=step, metadata={"loss": 1.0 / step}, compress=None)
    return str(root)


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        capsys.readouterr()
        self.status = main(list(argv))
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]


def damage(run: str, step: int = 2) -> Path:
    (path,) = Path(run).glob(f"steps/{step:08d}-*/data/*")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    return path


def test_ls(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    ck.pin(run, 1)
    done = Ran(capsys, "ls", run)
    assert done.status == 0
    assert done.words[0] == ["step", "saved", "size", "new", "shared", "tensors", "ranks", "pinned", "state"]
    assert done.words[1][-4:] == ["2", "1", "yes", "ok"]
    assert done.words[2][3:9] == ["43.0", "KiB", "3.9", "KiB", "39.1", "KiB"]
    told = Ran(capsys, "ls", run, "--json").json
    assert [(s["step"], s["new_bytes"], s["shared_bytes"]) for s in told["steps"]] == [(1, 44000, 0), (2, 4000, 40000)]


def test_ls_of_an_empty_store_and_of_none(tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for entry in Path(run).glob("steps/*/COMMIT"):
        entry.unlink()
    done = Ran(capsys, "ls", run)
    assert (done.status, "no steps" in done.out) == (0, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = Ran(capsys, "ls", str(empty))
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("vescale-ckpt: ")
    assert "no checkpoints here" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    ["ls P", "show P", "verify P", "diff P P", "gc P", "cat P w", "export P out --format hf", "pin P", "unpin P 1"],
)
def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    nothing = tmp_path / "nothing"
    done = Ran(capsys, *(str(nothing) if word == "P" else word for word in words.split()))
    assert (done.status, done.out) == (1, "")
    assert f"{nothing}: no checkpoints here: the folder does not exist." in done.err
    assert not nothing.exists()


def test_steps_are_named_alike_everywhere(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify", "ls"):
        texts = [Ran(capsys, command, *where).out for where in ([f"{run}@1"], [run, "1"], [f"{run}@1", "1"])]
        assert texts[0]
        assert texts == texts[:1] * 3
    assert [row[0] for row in Ran(capsys, "ls", run, "1").words] == ["step", "1"]
    assert [row[0] for row in Ran(capsys, "ls", f"{run}@latest").words] == ["step", "2"]
    assert Ran(capsys, "pin", run, "1").out == "step 1 is pinned\n"
    assert Ran(capsys, "unpin", run, "1").out == "step 1 is not pinned\n"
    for command in ("show", "verify", "pin", "unpin", "ls"):
        done = Ran(capsys, command, f"{run}@1", "2")
        assert (done.status, "two steps; give one" in done.err) == (2, True), command
        assert Ran(capsys, command, run, "7").status == 1
        assert Ran(capsys, command, f"{run}@7").status == 1
    done = Ran(capsys, "cat", f"{run}@x", "step")
    assert done.status == 1
    assert f"If 'x' is to be a step of {run}: a step is a number" in done.err


def test_wrong_arguments_show_the_usage_of_the_command(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["verify", run, "--step", "1"], ["verify", run, "one"], ["verify", run, "--threads", "0"]):
        done = Ran(capsys, *argv)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("usage: vescale-ckpt verify ")
    done = Ran(capsys, "--json", "ls", run)
    assert done.status == 2
    assert "unrecognized arguments: --json (options come after the command)" in done.err
    done = Ran(capsys, "gc", run, "--keep-last", "0")
    assert "vescale-ckpt: --keep-last: expected" in done.err


def test_errors_as_json(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, status, text in (
        (["ls", str(tmp_path / "none"), "--json"], 1, "does not exist"),
        (["cat", run, "model.x", "--json"], 1, "model.x: not in step 2"),
        (["pin", run, "--step", "1", "--json"], 2, "unrecognized arguments"),
        (["gc", "--json"], 2, "required: path"),
    ):
        done = Ran(capsys, *argv)
        assert done.status == status
        assert set(done.json) == {"error"}
        assert text in done.json["error"]
        assert text in done.err


@pytest.mark.parametrize("url", ["s4://x/y", "file:relative://x", "file://host/x", "http\0://x", ""])
def test_a_bad_url_is_one_line(capsys: pytest.CaptureFixture[str], url: str) -> None:
    for argv in (["ls", url], ["import", __file__, url, "--format", "torch"]):
        done = Ran(capsys, *argv)
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith("vescale-ckpt: ")
        assert len(done.err.splitlines()) == 1


def test_a_client_that_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    done = Ran(capsys, "ls", "s3://bucket/run")
    assert (done.status, done.out) == (1, "")
    assert "Install s3fs" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_save_that_may_be_dead(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = step_folder(9, "0123456789abcdef")
    path = Path(run, folder, "LEASE")
    path.parent.mkdir()
    path.write_bytes(Lease("0123456789abcdef", time.time() + 1740, ()).to_bytes())
    for command in ("ls", "gc"):
        told = Ran(capsys, command, run).out
        assert f"{folder}: " in told
        assert "lease until " in told
        assert ", in 29 min; if no saver runs: gc --break-leases" in told
    assert "removed 1 unfinished save" in Ran(capsys, "gc", run, "--break-leases").out
    assert not path.exists()


def test_ls_says_what_is_damaged(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = Path(run).glob("steps/00000002-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    done = Ran(capsys, "ls", run)
    assert done.status == 1
    assert done.words[2][-1] == "damaged"


def test_show(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "show", run)
    assert done.status == 0
    assert "step 2 in steps/00000002-" in done.out
    assert "compression 1.00x, dedup 11.00x" in done.out
    rows = {row[0]: row for row in done.words if row}
    assert rows["model.w"][1:4] == ["float32", "[200,", "50]"]
    assert rows["step"][1:] == ["value", "2"]
    assert "\x1b" not in done.out, "text from a file must not reach the terminal as it is"
    assert "evil\\x1b[2J" in done.out


def test_show_one_step_and_some_keys(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["show", run, "1", "model.*", "--json"], ["show", f"{run}@1", "model", "--json"]):
        told = Ran(capsys, *argv).json
        assert told["info"]["step"] == 1
        assert [leaf["name"] for leaf in told["leaves"]] == ["model.w", "model.b"]
    assert Ran(capsys, "show", run, "one", "x").status == 2
    assert Ran(capsys, "show", run, "7").status == 1


def test_verify(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "verify", run)
    assert (done.status, done.words[0][:3]) == (0, ["step", "2:", "ok"])
    assert done.err == "", "a bar is for terminals only"
    assert Ran(capsys, "verify", run, "--all", "--json").json["ok"] is True
    path = damage(run)
    done = Ran(capsys, "verify", run)
    assert done.status == 1
    assert "model.b" in done.out
    assert path.name in done.out
    assert Ran(capsys, "verify", f"{run}@1").status == 0
    done = Ran(capsys, "verify", f"{run}@all", "--json")
    assert (done.status, done.json["damaged_tensors"]) == (1, ["model.b"])
    assert Ran(capsys, "verify", f"{run}@1", "--all").status == 2
    assert Ran(capsys, "verify", run, "--threads", "0").status == 2


def test_diff(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "diff", f"{run}@1", f"{run}@2")
    assert done.status == 1
    rows = {row[0]: row for row in done.words}
    assert rows["model.b"][1] == "changed"
    assert rows["model.b"][-5:] == ["1000", "of", "1000", "1", "1"]
    assert "model.w" not in rows
    assert rows["step"][1:] == ["changed", "1", "2"]
    assert Ran(capsys, "diff", run, f"{run}@2").status == 0
    told = Ran(capsys, "diff", f"{run}@1", run, "--json").json
    assert told["equal"] is False
    assert {t["name"]: t["kind"] for t in told["report"]["tensors"]} == {"model.w": "equal", "model.b": "changed"}
    assert Ran(capsys, "diff", f"{run}@all", run).status == 2


def test_gc_and_pin(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "gc", run, "--keep-last", "1", "--dry-run")
    assert done.status == 0
    assert "would remove 1 step: 1" in done.out
    assert Ran(capsys, "pin", f"{run}@1").out == "step 1 is pinned\n"
    assert "1 step: 1" not in Ran(capsys, "gc", run, "--keep-last", "1").out
    assert Ran(capsys, "unpin", f"{run}@1", "--json").json == {"step": 1, "pinned": False}
    told = Ran(capsys, "gc", run, "--keep-every", "10", "--json").json
    assert (told["steps"], told["kept"]) == ([1], [2])
    assert Ran(capsys, "pin", f"{run}@1").status == 1


@pytest.mark.parametrize("best", ["loss:max", "loss:max:1"])
def test_gc_by_metadata(run: str, capsys: pytest.CaptureFixture[str], best: str) -> None:
    assert Ran(capsys, "gc", run, "--keep-best", best, "--json").json["kept"] == [1, 2]


@pytest.mark.parametrize(
    "argv",
    [
        ["--keep-last", "0"],
        ["--keep-last", "x"],
        ["--keep-best", "loss"],
        ["--keep-best", "loss:best"],
        ["--keep-best", "loss:min:x"],
        ["--grace", "-1"],
        ["--keep-everything"],
    ],
)
def test_gc_used_wrongly_removes_nothing(run: str, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    done = Ran(capsys, "gc", run, *argv)
    assert (done.status, done.out) == (2, "")
    assert Ran(capsys, "ls", run, "--json").json["steps"][0]["step"] == 1


def test_cat(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "cat", run, "model.w", "--slice", "3,:4")
    assert (done.status, done.words[0]) == (0, ["model.w:", "float32[4]"])
    assert [float(word.strip("tensor()[],.")) for word in done.words[1]] == [150.0, 151.0, 152.0, 153.0]
    told = Ran(capsys, "cat", f"{run}@1", "model.b", "--slice", "998:", "--json").json
    assert told == {"key": "model.b", "dtype": "float32", "shape": [2], "values": [1.0, 1.0]}
    assert Ran(capsys, "cat", run, "step").out == "2\n"
    assert Ran(capsys, "cat", run, "model", "--json").json["value"] == {"w": "float32[200, 50]", "b": "float32[1000]"}
    assert "\x1b" not in Ran(capsys, "cat", run, "name").out


def test_cat_used_wrongly(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = Ran(capsys, "cat", run, "model.x")
    assert done.status == 1
    assert "model.x" in done.err
    for part in ("a", "1:2:3:4", "", "1:2,,3", "0,0,0", "::-1"):
        done = Ran(capsys, "cat", run, "model.w", "--slice", part)
        assert done.status == 2, part
        assert "slice" in done.err
    assert Ran(capsys, "cat", run, "step", "--slice", "0").status == 2


def test_plugins_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    told = Ran(capsys, "plugins", "--json").json
    assert set(told) == {"plugins", "switched_off"}


def test_wrong_use_of_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["polish"], ["ls"], ["ls", "a", "b"]):
        done = Ran(capsys, *argv)
        assert done.status == 2
        assert "usage:" in done.err
    done = Ran(capsys, "--version")
    assert done.status == 0
    assert done.out.startswith("vescale-ckpt ")


def test_debug_shows_where(tmp_path: Path) -> None:
    with pytest.raises(ck.MissingStepError):
        main(["ls", str(tmp_path), "--debug"])


def test_a_reader_that_has_enough_is_no_error(run: str) -> None:
    script = "import sys; from vescale_ckpt._cli import main; sys.exit(main(sys.argv[1:]))"
    shell = f'"{sys.executable}" -c "{script}" show "{run}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_urls_work(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    url = "memory://vescale-ckpt-cli-test"
    ck.save(url, {"w": torch.ones(300)}, step=4)
    assert Ran(capsys, "ls", url, "--json").json["steps"][0]["step"] == 4
    assert Ran(capsys, "verify", f"{url}@4").status == 0


def test_plugins_are_listed_if_one_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(_plugins.OFF, "dtensor,rng,comm,pipe")
    info = tmp_path / "broken_toy-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-toy\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[vescale]\nbroken = a_module_that_is_missing\n")
    _plugins.reset()
    try:
        done = Ran(capsys, "plugins")
        assert done.status == 1
        assert ["broken", "broken-toy", "3.1", "not", "looked", "at"] in done.words
        assert [row[0] for row in done.words[1:-1]] == ["broken", "ckpt"]
        assert "a_module_that_is_missing" in done.err
        assert set(Ran(capsys, "plugins", "--json").json) == {"error"}
    finally:
        _plugins.reset()
