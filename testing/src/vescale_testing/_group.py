"""A group of rank processes seen from the test process: run jobs on it, wait with a deadline, end it."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from vescale_testing._client import Server, ServerDied
from vescale_testing._messages import Job, Outcome, receive

GRACE = 3.0  # seconds that the other ranks have once one has failed
SKIP_GRACE = 1.0  # the same once one has skipped
JOIN_TIMEOUT = 60.0  # seconds for the ranks to find each other
OUTPUT_LIMIT = 4000


@dataclass(slots=True)
class Run:
    """How one job went."""

    world: int
    timeout: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # of the ranks that had to be stopped
    outputs: dict[int, str] = field(default_factory=dict)  # the end of what each rank printed
    is_overdue: bool = False

    @property
    def is_clean(self) -> bool:
        """Tell whether all ranks ended the same good way and can take another job."""
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        return len(self.outcomes) == self.world and len(kinds) == 1 and kinds <= {"ok", "skip", "xfail"}


class RankGroup:
    """`world` rank processes in one gloo group."""

    def __init__(self, server: Server, world: int, path: str) -> None:
        self.server = server
        self.world = world
        self.folder = Path(tempfile.mkdtemp(dir=server.folder))
        self.is_closed = False
        self._offsets = [0] * world
        self._has_joined = False
        try:
            self.number, self.conns = server.fork(world, str(self.folder), path)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def run(self, job: Job, timeout: float) -> Run:
        """Run a job on all ranks. Afterwards the group is of further use only if the run `is_clean`."""
        run = Run(self.world, timeout)
        self._offsets = [self._log_size(rank) for rank in range(self.world)]
        if not self._has_joined:
            self._collect(run, time.monotonic() + JOIN_TIMEOUT)
            self._has_joined = len(run.outcomes) == self.world and run.is_clean
            if not self._has_joined:
                return self._complete(run)
            # Only now, or a rank could fail and leave while its peers still try to connect to it.
            run.outcomes.clear()
        data = pickle.dumps(job)
        for conn in self.conns:
            with contextlib.suppress(OSError):  # that rank has died; reading from it says so below
                conn.send_bytes(data)
        self._collect(run, time.monotonic() + timeout)
        return self._complete(run)

    def _complete(self, run: Run) -> Run:
        stuck = [rank for rank in range(self.world) if rank not in run.outcomes]
        if stuck:
            run.stacks = self._ask_stacks(stuck)
        run.outputs = {rank: self._output(rank) for rank in range(self.world)}
        return run

    def _collect(self, run: Run, deadline: float) -> None:
        pending = dict(enumerate(self.conns))
        has_grace = False
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                run.is_overdue = not has_grace
                return
            ready = wait([self.server.conn, *pending.values()], left)
            if self.server.conn in ready:
                self.server.pump()
            for rank in [rank for rank, conn in pending.items() if conn in ready]:
                run.outcomes[rank] = outcome = self._take(rank)
                del pending[rank]
                if outcome.kind != "ok" and not has_grace:
                    has_grace = True
                    grace = GRACE if outcome.kind in ("fail", "died") else SKIP_GRACE
                    deadline = min(deadline, time.monotonic() + grace)

    def _take(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = receive(self.conns[rank])
        except (EOFError, OSError):
            exited = self.server.wait_exit(self.number, rank, 10.0)
            if exited is None:
                return Outcome("died", time.monotonic(), "it closed its connection but still runs")
            how = f"exit code {exited.status}" if exited.status >= 0 else _signal_name(-exited.status)
            text = _without_harness(self._read_stacks(rank))
            return Outcome("died", exited.when, f"{how}\n{text}".rstrip(), how)
        return outcome

    def _ask_stacks(self, ranks: list[int]) -> dict[int, str]:
        self.server.signal(self.number, ranks, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        previous: dict[int, str] = {}
        while time.monotonic() < deadline:
            time.sleep(0.1)
            found = {rank: self._read_stacks(rank) for rank in ranks}
            if found == previous and all(found.values()):
                break
            previous = found
        return {rank: _without_harness(text) for rank, text in previous.items()}

    def close(self) -> None:
        """Let idle ranks end by themselves; whoever does not is killed."""
        self._finish(kill=False)

    def kill(self) -> None:
        """Kill all ranks and what they started."""
        self._finish(kill=True)

    def _finish(self, *, kill: bool) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if kill:
                self.server.signal(self.number, list(range(self.world)), signal.SIGKILL)
            for conn in self.conns:
                conn.close()
            if not self.server.wait_gone(self.number, 10.0):
                self.server.signal(self.number, list(range(self.world)), signal.SIGKILL)
                self.server.wait_gone(self.number, 10.0)
        except ServerDied:
            pass  # and its ranks with it
        finally:
            self.server.forget(self.number)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _log_size(self, rank: int) -> int:
        log = self.folder / f"{rank}.log"
        return log.stat().st_size if log.exists() else 0

    def _output(self, rank: int) -> str:
        log = self.folder / f"{rank}.log"
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(max(self._offsets[rank], self._log_size(rank) - 4 * OUTPUT_LIMIT))
            return file.read().decode(errors="replace")[-OUTPUT_LIMIT:]

    def _read_stacks(self, rank: int) -> str:
        stacks = self.folder / f"{rank}.stacks"
        return stacks.read_text(errors="replace") if stacks.exists() else ""


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _without_harness(stacks: str) -> str:
    """Drop the frames of this package, the server's start and the list of extension modules."""
    noise = (f'"{Path(__file__).parent}', 'File "<string>"', "Extension modules:")
    return "\n".join(line for line in stacks.splitlines() if not any(text in line for text in noise)).strip()
