"""`python -m vescale_rng doctor`: exit status, table and JSON. (`plugins` is tested in test_plugins.py.)"""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from vescale_rng import __main__ as main
from vescale_rng._doctor import calls, cases, fills
from vescale_rng._draw import cpu_sources


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor who looks at little."""
    monkeypatch.setattr(fills, "FILLS", tuple(c for c in cases.FILLS if c.name in ("rand_like", "random_()")))
    monkeypatch.setattr(calls, "CALLS", tuple(c for c in cases.CALLS if c.name == "randperm"))
    assert main.main(["doctor"]) == 0  # the laws are trusted from here on


@pytest.mark.usefixtures("few")
def test_a_healthy_machine_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    before = torch.get_rng_state()
    assert main.main(["doctor", "--json"]) == 0
    assert torch.equal(torch.get_rng_state(), before)
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    names = [f["name"] for f in said["findings"] if f["section"] == "cpu"]
    assert names == ["rand_like", "random_()", "randperm"]


@pytest.mark.usefixtures("few")
def test_a_broken_law_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_sources.Even, "finish", lambda self: self.seek(self.numel * self.words + 1))
    capsys.readouterr()
    assert main.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("rand_like ") and "NOT bitwise here" in line]
    assert "NOT bitwise here: part 0 of 3" in row
    assert any(line.startswith("NOT bitwise on CPU: rand_like, random_.") for line in lines)
    assert lines[-1] == "2 of 8 lines are not as expected."

    assert main.main(["doctor", "--json"]) == 1
    bad = [f["name"] for f in json.loads(capsys.readouterr().out)["findings"] if not f["ok"]]
    assert bad == ["rand_like", "random_()"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"vescale-rng {version('vescale-rng')}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["cure"])
    assert caught.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_program_with_other_kernels() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "vescale_rng", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU kernels DEFAULT" in done.stdout.replace("\n  ", " ")
    assert done.stdout.endswith("All is as expected.\n")
