"""The code of the README runs: in one process, on ranks, and again where it left off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale_ckpt as ck

README = Path(__file__).parents[1] / "README.md"


def run_blocks():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, str(README), "exec"), names)
    return names


def check_two_runs(folder):
    first = run_blocks()
    if dist.is_initialized():
        dist.barrier()  # the first rank removes old steps
    assert first["start"] == 0
    assert ck.Checkpointer(folder / "run").steps() == [3, 4, 5]
    second = run_blocks()
    assert second["start"] == 5
    assert second["step"] == 10
    loaded = ck.load_dict(folder / "run", keys="model.*")["model"]
    assert torch.equal(loaded["weight"], second["model"].weight)


def test_in_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_two_runs(tmp_path)


@pytest.mark.ranks(4)
def test_on_ranks(rank, tmp_path):
    os.chdir(tmp_path)
    check_two_runs(tmp_path)


def run_in_one_process():
    folder = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {folder!r}); import test_readme as t; names = t.run_blocks()"
    text = f"{script}; print(names['start'], names['step'])"
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.ranks(2)
def test_again_with_another_number_of_ranks(rank, tmp_path):
    os.chdir(tmp_path)
    if rank == 0:
        assert run_in_one_process() == (0, 5)
    dist.barrier()
    on_two = run_blocks()
    assert (on_two["start"], on_two["step"]) == (5, 10)
    dist.barrier()
    if rank == 0:
        assert run_in_one_process() == (10, 15)
    dist.barrier()


def test_the_table_of_calls_names_what_there_is():
    names = set(re.findall(r"^\| `(\w+)", README.read_text(), re.MULTILINE)) - {"vescale_layout"}
    hooks = {name for name in names if name.startswith("vescale_")}
    assert names - hooks
    assert all(hasattr(ck, name) for name in names - hooks)
