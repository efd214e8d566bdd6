"""The test process's side of the fork server: start it, order ranks, learn of their ends, shut it down."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import IO, Any

from vescale_testing._messages import Exited, Fork, Hello, Ready, Signal, receive, send

FORCED_ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
WARM_UP_TIMEOUT = 300.0
_CODE = "import sys; from vescale_testing._server import main; main(int(sys.argv[1]))"


def rank_environ() -> dict[str, str]:
    """Return this environment as the ranks shall see it: one thread, gloo on the loop-back device."""
    environ = {**os.environ, **FORCED_ENVIRON}
    if LOOPBACK is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    return environ


class ServerDied(RuntimeError):
    """The fork server ended by itself; the text holds its last output."""


class Server:
    """A running fork server."""

    def __init__(self) -> None:
        self.exits: dict[tuple[int, int], Exited] = {}
        self.alive: dict[int, set[int]] = {}  # group -> ranks not yet reaped
        self.is_warm = False
        self._num_groups = 0
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.conn, child = Pipe(duplex=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(child.fileno())],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=rank_environ(),
            start_new_session=True,  # Ctrl-C goes to the test process alone, which then ends the ranks
        )
        child.close()
        self.folder = tempfile.mkdtemp(prefix="vescale-ranks-")
        send(self.conn, Hello(list(sys.path), self.folder))

    def fork(self, world: int, folder: str, path: str) -> tuple[int, list[Connection[Any, Any]]]:
        """Start ranks; return the number of their group and a connection to each."""
        self._wait_warm()
        self._num_groups += 1
        group = self._num_groups
        pipes = [Pipe(duplex=True) for _ in range(world)]
        self.alive[group] = set(range(world))
        try:
            send(self.conn, Fork(group, world, folder, path))
            for _, theirs in pipes:
                reduction.send_handle(self.conn, theirs.fileno(), self.process.pid)
                theirs.close()
        except OSError:
            raise self._died() from None
        return group, [ours for ours, _ in pipes]

    def signal(self, group: int, ranks: list[int], number: int) -> None:
        """Send a signal to those of these ranks that still live."""
        try:
            send(self.conn, Signal(group, tuple(ranks), number))
        except OSError:
            raise self._died() from None

    def pump(self) -> None:
        """Take in what the server has said so far, without waiting."""
        try:
            while self.conn.poll():
                message = receive(self.conn)
                if isinstance(message, Exited):
                    self.exits[message.group, message.rank] = message
                    self.alive[message.group].discard(message.rank)
        except (EOFError, OSError):
            raise self._died() from None

    def wait_exit(self, group: int, rank: int, timeout: float) -> Exited | None:
        """Wait until a rank is reaped."""
        deadline = time.monotonic() + timeout
        while (group, rank) not in self.exits:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                self.conn.poll(left)
            except OSError:  # closed by us: some test ended this server
                raise self._died() from None
            self.pump()
        return self.exits[group, rank]

    def wait_gone(self, group: int, timeout: float) -> bool:
        """Wait until all ranks of a group are reaped; tell whether they are."""
        deadline = time.monotonic() + timeout
        return all(
            self.wait_exit(group, rank, deadline - time.monotonic()) is not None for rank in sorted(self.alive[group])
        )

    def forget(self, group: int) -> None:
        """Drop the record of a group."""
        for rank in [rank for number, rank in self.exits if number == group]:
            del self.exits[group, rank]
        self.alive.pop(group, None)

    def close(self) -> None:
        """End the server and, with it, every rank."""
        self.conn.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # in case the server was killed

    def _wait_warm(self) -> None:
        if self.is_warm:
            return
        if not self.conn.poll(WARM_UP_TIMEOUT):
            raise ServerDied(f"the fork server of the rank tests was not ready within {WARM_UP_TIMEOUT:g} s")
        try:
            self.is_warm = isinstance(receive(self.conn), Ready)
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ServerDied:
        try:
            status: object = self.process.wait(5)
        except subprocess.TimeoutExpired:
            status = "none: still running"
        text = ""
        if not self._log.closed:
            self._log.seek(0)
            text = b"".join(deque(self._log, maxlen=60)).decode(errors="replace")
        return ServerDied(f"the fork server of the rank tests has ended (exit status {status}); its output:\n{text}")


_server: Server | None = None


def get_server() -> Server:
    """Return the session's server, started if need be; it may still be warming up."""
    global _server
    if _server is not None and _server.process.poll() is not None:
        close_server()
    if _server is None:
        _server = Server()
    return _server


def close_server() -> None:
    """End the session's server, if there is one."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


atexit.register(close_server)
