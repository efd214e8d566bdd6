"""The core of the table where torch's kernels round in another way, or run on two threads.

Both are settled when torch is imported, so each setting needs a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@functools.cache
def run(script: Path, capability: str, threads: int) -> dict[str, Any]:
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_core_of_the_table(script: Path, capability: str, threads: int) -> None:
    if capability == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    told = run(script, capability, threads)
    assert told["threads"] == threads
    assert told["capability"] == capability.upper()
    assert told["ran"] > 300


@pytest.mark.slow
def test_settings_do_change_the_kernels(script: Path) -> None:
    """A check of the tests above: on CPUs with AVX2 the settings round normal numbers in different ways."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    assert run(script, "default", 1)["normals"] != run(script, "avx2", 1)["normals"]
