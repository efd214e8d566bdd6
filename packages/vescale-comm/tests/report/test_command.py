"""The command that predicts."""

from __future__ import annotations

import pytest

from vescale_comm.__main__ import main
from vescale_comm._report import AxisCost, MeshCosts

LINK = ["--link", "shard=5e-6:45e9", "--link", "replicate=1e-5:25e9:tree"]


def test_one_mesh(capsys):
    assert main(["predict", "llama-3-8b", "--mesh", "shard=64", "--compute-seconds", "2", *LINK]) == 0
    out = capsys.readouterr().out
    assert "fsdp on shard=64:" in out
    assert "group shard: busy for" in out


def test_a_table_of_meshes(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(MeshCosts({("shard",): AxisCost.of_link(5e-6, 45e9)}).to_json())
    arguments = ["--mesh", "shard=8", "--mesh", "replicate=125,shard=80", "--compute-seconds", "1", "--prefetch", "2"]
    links = ["--costs", str(file), *LINK[2:]]
    assert main(["predict", "llama-3-8b", *arguments, "--param-bytes", "2", "--no-reshard", *links]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["mesh", "ranks", "step"]
    assert first.split()[:2] == ["shard=8", "8"]
    assert second.split()[:4] == ["replicate=125", "x", "shard=80", "10000"]


def test_errors(capsys):
    assert main(["predict", "llama-3-8b", "--mesh", "dp=8", "--compute-seconds", "1"]) == 1
    assert "nothing is known of the mesh axis dp" in capsys.readouterr().err
    for wrong in (["--mesh", "dp=none"], ["--mesh", "dp=2", "--link", "dp=fast"]):
        with pytest.raises(SystemExit):
            main(["predict", "llama-3-8b", *wrong, "--compute-seconds", "1"])
        assert "expected" in capsys.readouterr().err
