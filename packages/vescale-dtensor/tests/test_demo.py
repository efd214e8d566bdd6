"""The example that trains a GPT beside its single-device twin: all meshes, both launchers, and failures."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vescale_dtensor import _random, random_mode

FOLDER = Path(__file__).parents[3] / "examples" / "nanogpt"
SMALL = ["--steps", "3", "--layers", "2", "--width", "32", "--batch-size", "8", "--dtype", "float64"]

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the examples are in the repository only")


def train(mesh: str, out: Path, *more: str) -> tuple[bool, dict[str, Any]]:
    """Train on the ranks that exist; the verdict of this rank, and what it wrote if it is the first."""
    sys.path.insert(0, str(FOLDER))
    import train as script  # type: ignore[import-not-found]

    equal = script.train(script.parse(["--mesh", mesh, *SMALL, "--out", str(out), *more]))
    return equal, json.loads((out / "losses.json").read_text()) if dist.get_rank() == 0 else {}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2,dp=2", "dp=4", "tp=4"])
def test_mesh_has_the_losses_of_one_device(mesh: str, rank: int, tmp_path: Path) -> None:
    with random_mode("whole"):
        equal, written = train(mesh, tmp_path)
    assert equal
    if rank == 0:
        assert written["ok"]
        assert len(written["parallel"]) == 3
        assert written["max_difference"] <= 1e-12
        assert written["parameter_difference"] <= 1e-10
        assert 5.0 < written["single"][0] < 6.0


@pytest.mark.ranks(1)
def test_mesh_of_one_rank(tmp_path: Path) -> None:
    with random_mode("whole"):
        equal, written = train("dp=1", tmp_path)
    assert equal
    assert written["max_difference"] == 0.0


@pytest.mark.ranks(2)
def test_other_random_numbers_are_noticed(rank: int, tmp_path: Path) -> None:
    _random.use_provider(None)  # each shard draws from a stream of its own
    try:
        equal, _ = train("dp=2", tmp_path, "--dropout", "0.5")
    finally:
        _random.forget_provider()
    assert equal == (rank != 0)


def run(*command: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a command with its output captured and one thread per process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "VESCALE_PLUGINS_OFF")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=FOLDER, check=False
    )


@pytest.mark.slow
def test_script_starts_its_own_ranks(tmp_path: Path) -> None:
    done = run(sys.executable, "train.py", "--mesh", "dp=2,tp=2", *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.count("|") == 4 for line in lines) == 4, done.stdout  # a heading and three steps
    assert "EQUAL within the tolerance of 1e-12" in done.stdout
    assert json.loads((tmp_path / "losses.json").read_text())["mesh"] == "dp=2,tp=2"


@pytest.mark.slow
def test_script_joins_torchrun(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = run(*torchrun, "train.py", "--mesh", "tp=2", *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL within the tolerance of 1e-12" in done.stdout


@pytest.mark.slow
def test_failing_rank_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    code = f"""
import sys, torch.distributed as dist, train
step = train.Trainer.step
def failing_step(self, *batch):
    if dist.get_rank() == 2:
        raise ArithmeticError("the third rank is tired")
    return step(self, *batch)
train.Trainer.step = failing_step
sys.exit(train.main({["--mesh", "dp=2,tp=2", *SMALL, "--out", str(tmp_path)]!r}))
"""
    done = run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert "rank 2 failed" in done.stderr
    assert "ArithmeticError: the third rank is tired" in done.stderr
    assert "rank 0 failed" not in done.stderr


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mesh", ["dp=0", "pp=2", "dp=2,dp=2", "dp"])
def test_wrong_mesh_is_explained(mesh: str) -> None:
    sys.path.insert(0, str(FOLDER))
    import train as script

    with pytest.raises(argparse.ArgumentTypeError, match="expected sizes of the axes dp"):
        script.parse_mesh(mesh)
