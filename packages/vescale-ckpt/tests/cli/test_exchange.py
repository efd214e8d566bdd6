"""Export and import on the command line, against what other libraries read and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import vescale_ckpt as ck
from vescale_ckpt._cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A store with steps 1 and 2; a tied tensor, and values. Beside it a file of torch."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    for step in (1, 2):
        w = torch.full((4, 3), float(step))
        state = {"model": {"w": w, "head": w, "b": torch.arange(2), "n": 5}, "step": step}
        ck.save(tmp_path / "run", state, step=step)
    return str(tmp_path / "run")


def test_hugging_face_folders(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    assert main(["export", f"{run}@1", str(out), "--format", "hf", "--dtype", "bfloat16"]) == 0
    told = capsys.readouterr().out
    assert "step 1: 2 tensors, 40 B -> " in told
    assert "the same tensor as w: head" in told
    assert "no tensors: model.n" in told
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], torch.ones(4, 3, dtype=torch.bfloat16))


def test_shards_patterns_and_other_names(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shards"
    chosen = ["--keys", "model.w", "--keys", "model.b", "--rename", "^model[.]=net/", "--max-shard-bytes", "48"]
    assert main(["export", run, str(out), "--format", "safetensors", *chosen, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["bytes"], len(told["files"])) == (2, 2, 64, 3)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"net/w", "net/b"}
    found = load_file(out / index["weight_map"]["net/w"])["net/w"]
    assert torch.equal(found, torch.full((4, 3), 2.0))


def test_torch_and_dcp(run: str, tmp_path: Path) -> None:
    assert main(["export", run, str(tmp_path / "c.pt"), "--format", "torch"]) == 0
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert found["step"] == 2
    assert torch.equal(found["model"]["head"], torch.full((4, 3), 2.0))
    assert main(["export", run, str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    target = {"model": {"w": torch.zeros(4, 3)}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["model"]["w"], torch.full((4, 3), 2.0))


def test_import_tells_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": torch.arange(6.0)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    dcp.save(state, checkpoint_id=tmp_path / "a.dcp", no_dist=True)
    run = tmp_path / "run"
    for number, (name, kind) in enumerate([("a.safetensors", "safetensors"), ("a.pt", "torch"), ("a.dcp", "dcp")]):
        assert main(["import", str(tmp_path / name), f"{run}@{10 * number}", "--under", "model"]) == 0
        told = capsys.readouterr().out
        assert told == f"{kind} -> step {10 * number}: 1 tensor, 0 other values, 24 B\n"
        assert torch.equal(ck.load_dict(run, step=10 * number)["model"]["w"], state["w"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export", "RUN@all", "OUT", "--format", "hf"], "looks at one step"),
        (["export", "RUN", "OUT", "--format", "torch", "--prefix", "model."], "--prefix: torch does not have it"),
        (["export", "RUN", "OUT", "--format", "dcp", "--rename", "a=b"], "--rename: dcp does not have it"),
        (["export", "RUN", "OUT", "--format", "hf", "--rename", "ab"], "expected REGEX=TEXT"),
        (["export", "RUN", "OUT", "--format", "hf", "--dtype", "int8"], "expected a floating point dtype"),
        (["export", "RUN", "OUT", "--format", "hf", "--max-shard-bytes", "many"], "--max-shard-bytes: expected"),
        (["import", "RUN", "OUT@latest"], "number of the step"),
        (["import", "RUN/../a.pt", "OUT", "--compress", "gzip"], '--compress: expected None, "auto" or a codec'),
    ],
)
def test_wrong_use(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    places = [word.replace("RUN", run).replace("OUT", str(tmp_path / "out")) for word in words]
    assert main(places) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_or_is_there_already(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path / "none.pt"), run]) == 1
    assert "none.pt is not there" in capsys.readouterr().err
    assert main(["export", f"{run}@9", str(tmp_path / "out"), "--format", "hf"]) == 1
    assert "no committed checkpoint of step 9" in capsys.readouterr().err
    (tmp_path / "b.pt").write_bytes(b"mine")
    assert main(["export", run, str(tmp_path / "b.pt"), "--format", "torch"]) == 1
    told = capsys.readouterr().err
    assert "b.pt is there already. Choose another place, or give --overwrite." in told
    assert "overwrite=True" not in told
    assert (tmp_path / "b.pt").read_bytes() == b"mine"


def test_a_store_is_not_imported(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (run, f"{run}@1"):
        assert main(["import", source, str(tmp_path / "other")]) == 1
        assert f"{run} is a store of vescale-ckpt already" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["import", str(tmp_path / "a.pt"), f"{run}@2"]) == 1
    assert "or give --overwrite" in capsys.readouterr().err
