"""The Triton kernel draws the bits of the torch operations: in triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def run(script: str, *args: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, str(HERE / script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_interpreter():
    assert run("triton_check.py", "cpu", TRITON_INTERPRET="1") == "compared 80\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu():
    assert run("triton_check.py", "cuda") == "compared 80\n"


def test_compiled_code_fuses_and_approximates_nothing(tmp_path):
    lines = run("triton_compile.py", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(lines) == 12
    instructions = {word for line in lines for word in line.split()[1:]}
    rounded = {f"{name}.rn.{kind}" for name in ("add", "sub", "mul", "div") for kind in ("f32", "f64")}
    assert instructions <= rounded
    assert {"mul.rn.f32", "add.rn.f32", "mul.rn.f64", "add.rn.f64", "div.rn.f64"} <= instructions
