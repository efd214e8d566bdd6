"""The fork server: one warm process whose forks are the ranks of every test.

It is the parent of all ranks, reaps them, and ends with all of them as soon as the test process has gone,
however that went. On Linux it also adopts and ends processes that a rank leaves behind. It has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vescale_testing import _loading, _warm
from vescale_testing._messages import Exited, Fork, Hello, Ready, Signal, receive, send

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Server:
    def __init__(self, conn: Connection[Any, Any]) -> None:
        self.conn = conn
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (group, rank)
        self.problems: tuple[str, ...] = ()
        self.folder: str | None = None
        self.wake_read, self.wake_write = os.pipe()

    def serve(self) -> None:
        os.set_blocking(self.wake_write, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready = wait([self.conn, self.wake_read])
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                self.reap()
            if self.conn in ready:
                message = receive(self.conn)
                if isinstance(message, Fork):
                    self.fork(message)
                elif isinstance(message, Signal):
                    self.signal(message)

    def fork(self, order: Fork) -> None:
        # A file that does not compile is the ranks' to report.
        with contextlib.suppress(Exception):
            _loading.compile_file(order.path)
        for rank in range(order.world):
            handle = reduction.recv_handle(self.conn)
            pid = os.fork()
            if pid == 0:
                self.become_rank(order, rank, handle)
            os.close(handle)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # the child does it too: whoever comes first
            self.ranks[pid] = (order.group, rank)

    def become_rank(self, order: Fork, rank: int, handle: int) -> None:
        try:
            server = os.getppid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.conn.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            from vescale_testing import _rank

            _rank.main(rank, order.world, order.folder, Connection(handle), self.problems)
        finally:
            os._exit(1)

    def signal(self, order: Signal) -> None:
        # Only reaped pids leave the table, so none of these can belong to a stranger.
        for pid, (group, rank) in self.ranks.items():
            if group == order.group and rank in order.ranks:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if order.number == signal.SIGKILL else os.kill)(pid, order.number)

    def reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            if pid in self.ranks:
                self.end_leftovers(pid)  # while the dead rank still holds its number
            _, code = os.waitpid(pid, 0)
            if pid in self.ranks:
                group, rank = self.ranks.pop(pid)
                with contextlib.suppress(OSError):  # the test process has gone: the next receive ends the server
                    send(self.conn, Exited(group, rank, os.waitstatus_to_exitcode(code), time.monotonic()))

    def end_leftovers(self, pid: int) -> None:
        """Kill what a dead rank had started: its process group, and orphans that came to the server."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        me = os.getpid()
        children = Path(f"/proc/{me}/task/{me}/children")
        if children.exists():
            for child in map(int, children.read_text().split()):
                if child not in self.ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)

    def close(self) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while self.has_children() and time.monotonic() < deadline:
            time.sleep(0.005)
            self.reap()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def has_children() -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True


def main(handle: int) -> None:
    """Serve the test process at the other end of this file descriptor until it closes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = _Server(Connection(handle))
    try:
        hello: Hello = receive(server.conn)
        sys.path[:] = hello.path
        server.folder = hello.folder
        server.problems = _warm.warm_up()
        send(server.conn, Ready(server.problems))
        server.serve()
    except (EOFError, OSError):
        pass
    finally:
        server.close()
