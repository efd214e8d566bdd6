"""The processes behind the ranks: none is left after a run, and the fork server may be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vescale_testing import RankFailure, run_ranks
from vescale_testing._client import get_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fine() -> tuple[int, int]:
    return os.getppid(), os.getpid()


def start_children(rank: int) -> list[int]:
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL}
    return [subprocess.Popen(["sleep", "60"], start_new_session=new, **quiet).pid for new in (False, True)]


def fail(rank: int) -> None:
    start_children(rank)
    os.kill(os.getpid(), signal.SIGKILL if rank else signal.SIGSEGV)


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_runs_leave_no_process_and_no_zombie() -> None:
    server = get_server().process.pid
    pools = {pid for _, pid in run_ranks(fine, 2, pool=True)}
    before = children_of(server) if is_alive(server) else set()
    assert pools <= before
    for _ in range(3):
        assert {parent for parent, _ in run_ranks(fine, 3)} == {server}
        with pytest.raises(RankFailure):
            run_ranks(fail, 2)
    started = [pid for pids in run_ranks(start_children, 2) for pid in pids]
    assert len(started) == 4
    run_ranks(fine, 1)  # by its end the server has reaped what it had killed
    assert children_of(server) == before
    assert not any(map(is_alive, started))
    assert {pid for _, pid in run_ranks(fine, 2, pool=True)} == pools


def test_file_descriptors_do_not_pile_up() -> None:
    server = get_server().process.pid
    run_ranks(fine, 2)
    counts = []
    for _ in range(2):
        counts.append([len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), server)])
        for _ in range(3):
            run_ranks(fine, 4)
    assert counts[0] == counts[1]


def kill_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_a_lost_server_is_replaced() -> None:
    run_ranks(fine, 2, pool=True)
    server = get_server()
    with pytest.raises((RuntimeError, RankFailure)):
        run_ranks(kill_server, 1, timeout=5)
    server.process.wait(10)
    assert run_ranks(fine, 2)[0][0] == get_server().process.pid != server.process.pid
    run_ranks(fine, 2, pool=True)
