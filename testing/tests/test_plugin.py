"""The plugin in sessions of its own: fixtures, outcomes, options, and no process left, however one ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

TWO_PLUGINS = 'pytest_plugins = ["vescale_testing.plugin"]\n'
COMMAND = [
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "vescale_testing.plugin",
    "--import-mode=importlib",
    "-W",
    "error",
]

MANY = """
import os, time
import pytest, torch
import torch.distributed as dist
from vescale_testing import fake_ranks, run_ranks

class Thing:
    def __init__(self, value): self.value = value

@pytest.fixture
def thing(): return Thing(5)

@pytest.fixture
def stream(): return (number for number in [1])

@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fixtures(rank, world, tmp_path, thing, dtype, monkeypatch):
    monkeypatch.setenv("X", "y")
    (tmp_path / f"server-{os.getppid()}").touch()
    (tmp_path / str(rank)).write_text("here")
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir() if len(p.name) == 1) == ["0", "1"]
    assert (world, thing.value, torch.ones(1, dtype=dtype).dtype) == (2, 5, dtype)
    print(f"rank {rank} speaks")

class TestClass:
    number = 3

    @pytest.mark.ranks(2)
    def test_method(self, rank):
        assert self.number == 3

    class TestInner:
        @pytest.mark.ranks(2, pool=True)
        def test_inner(self): pass

@pytest.mark.ranks(2)
def test_assert(rank):
    value = [1, rank]
    assert value == [1, 0]

@pytest.mark.ranks(2)
def test_skip(rank): pytest.skip("not today")

@pytest.mark.ranks(2)
def test_xfail(rank): pytest.xfail("known")

@pytest.mark.xfail(reason="known")
@pytest.mark.ranks(2)
def test_marked_xfail(rank): assert rank == 7

@pytest.mark.ranks(2)
def test_pickle(stream): pass

@pytest.mark.ranks
def test_no_number(): pass

@pytest.mark.ranks(2, timeuot=5)
def test_misspelt(): pass

@pytest.mark.ranks(2, timeout=0.3)
def test_hang(rank): time.sleep(600)

def test_no_marker(rank, world): assert (rank, world) == (0, 1)
"""

HYPOTHESIS = """
import pytest, torch
import torch.distributed as dist
from hypothesis import given, strategies as st

@pytest.mark.ranks(2)
@given(number=st.integers(0, 1000))
def test_same_examples(rank, number):
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    assert total == 2 * number
"""

ENDLESS = """
import os, pathlib, subprocess, time
import pytest

@pytest.mark.ranks(2, pool=True)
def test_pool(): pass

@pytest.mark.ranks(2)
def test_endless(rank):
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(f"started-{rank}-{os.getppid()}").touch()
    time.sleep(600)
"""

if importlib.util.find_spec("hypothesis") is not None:
    MANY += HYPOTHESIS

pytestmark = pytest.mark.slow
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def run(folder: Path, source: str, *options: str, **environ: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Run a test file; return outcome and text of each test, and the terminal's text."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [*COMMAND, "--junitxml=out.xml", *options, "test_it.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )
    output = done.stdout + done.stderr
    assert (folder / "out.xml").exists(), output
    found = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        children = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = children[0].tag if children else "passed"
        text = (children[0].get("message") or "") + "\n" + (children[0].text or "") if children else ""
        found[case.get("name", "")] = (kind, text)
    return found, output


def processes_of_session(leader: int) -> list[str]:
    """List the processes, zombies too, of the session that a server leads, and what its ranks had started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().rsplit(")", 1)
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields.split()[3]) == leader or command == b"sleep\x00600\x00":
            found.append(f"{name}) {fields[:20]}")
    return found


def wait_until_gone(leader: int) -> None:
    deadline = time.monotonic() + 10
    while processes_of_session(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of_session(leader) == []


def test_outcomes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(TWO_PLUGINS)
    base = tmp_path / "base"
    found, output = run(tmp_path, MANY, f"--basetemp={base}")
    kinds = {name: kind for name, (kind, _) in found.items()}
    passed = {"test_fixtures[dtype0]", "test_fixtures[dtype1]", "test_method", "test_inner", "test_no_marker"}
    assert {name for name, kind in kinds.items() if kind == "passed"} - {"test_same_examples"} == passed, output
    skipped = {"test_skip", "test_xfail", "test_marked_xfail"}
    assert {name for name, kind in kinds.items() if kind == "skipped"} == skipped
    assert found["test_skip"][1].startswith("not today\n")
    assert "test_it.py:" in found["test_skip"][1]
    assert "rank 1 of 2 failed first: AssertionError: assert [1, 1] == [1, 0]" in found["test_assert"][1]
    assert "vescale_testing" not in found["test_assert"][1]
    assert "the argument 'stream' of test_pickle, of type generator, cannot be pickled" in found["test_pickle"][1]
    assert "takes one number of ranks" in found["test_no_number"][1]
    assert "keywords ['timeuot']" in found["test_misspelt"][1]
    assert "was still running at the time-out of 0.3 s" in found["test_hang"][1]
    assert "in test_hang" in found["test_hang"][1]
    assert found.get("test_same_examples", ("passed",))[0] == "passed", output
    (server,) = base.glob("test_fixtures_dtype0_0/server-*")
    if sys.platform == "linux":
        assert processes_of_session(int(server.name.split("-")[1])) == []


def test_options(tmp_path: Path) -> None:
    found, output = run(tmp_path, MANY, "-x", "-s", "-k", "fixtures or assert or inner")
    assert "[rank 1] rank 1 speaks\n" in output
    assert [kind for kind, _ in found.values()] == ["passed", "passed", "passed", "failure"]


def test_a_package_that_fails_to_preload_is_reported(tmp_path: Path) -> None:
    package = tmp_path / "vescale_dtensor"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('half a package')\n")
    found, _ = run(tmp_path, MANY, "-k", "method", PYTHONPATH=str(tmp_path))
    kind, text = found["test_method"]
    assert kind == "failure"
    assert "while preparing the ranks (vescale):\nTraceback" in text
    assert "ImportError: half a package" in text


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_session_that_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_it.py").write_text(ENDLESS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [*COMMAND, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
        # Who was started in the background by a shell ignores it, and so would the child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while len(started := list(tmp_path.glob("started-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    server = int(started[0].name.split("-")[2])
    assert len(processes_of_session(server)) >= 1 + 2 + 2 + 4  # server, pool, ranks, their children
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -number), output
    wait_until_gone(server)
    assert list((tmp_path / "tmp").glob("vescale-ranks-*")) == []
