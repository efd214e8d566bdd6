"""Kill a rank of a pipeline with SIGKILL at random points: all others must end in seconds, and name it.

    python drills/pipe_kill.py --kills 100 --seed 0

Half of the victims kill themselves after a random number of computations, so that the points are spread over all of
a step; the others are killed at a random time, in messages and waits too. The exit status is 1 if a rank went on,
hung, ended without an error, or was told of another rank only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from _pipe_rank import MICROBATCHES, Job, start
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
STORES = ("file", "launcher", "rank 0")
WIDTHS = (8, 512)
LIMIT = 5.0
"""Seconds from the death of a rank to the end of the last one."""
START = 60.0
"""Seconds within which all ranks have to be ready."""


class Drill:
    """Kills, and judges."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Take a folder for what ranks say, and what all random choices depend on."""
        self.folder = folder
        self.random = random.Random(seed)
        self.faults: list[str] = []
        """What must not be."""
        self.kinds: Counter[str] = Counter()
        """Errors of the ranks that were left."""
        self.slowest = 0.0
        """Seconds from a death to the last error of all."""
        self._number = 0
        self._launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def kill(self, schedule: str, store: str, world: int, width: int) -> None:
        """Run a pipeline until one of its ranks is killed, and judge what the others say."""
        self._number += 1
        says = str(self.folder / f"{self._number}.txt")
        address = {
            "file": f"{says}.store",
            "launcher": str(self._launcher.port),
            "rank 0": str(_free_port()) if store == "rank 0" else "",
        }[store]
        computations = 4 * MICROBATCHES
        after = self.random.randint(1, 2 * computations) if self.random.random() < 0.5 else None
        victim = self.random.randrange(world)
        job = Job(str(self._number), schedule, world, width, store, address, victim, after, says)
        processes = start(job)
        where = f"{schedule}, {world} ranks, store: {store}, width {width}, rank {victim} killed"
        where += " at a random time" if after is None else f" after {after} computations"
        if not self._wait(job, "ready", world, START):
            self.faults.append(f"{where}: not ready after {START:g} s; {self._lines(job)}")
        elif after is None:
            time.sleep(self.random.random() * 0.05)
            died = time.monotonic()
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self._judge(job, died, where)
        elif self._wait(job, "dies", 1, START):
            self._judge(job, float(next(row[2] for row in self._lines(job) if row[1] == "dies")), where)
        else:
            self.faults.append(f"{where}: it lived on; {self._lines(job)}")
        for process in processes:
            process.kill()
            process.join()

    def _judge(self, job: Job, died: float, where: str) -> None:
        others = set(range(job.world)) - {job.victim}
        self._wait(job, "error", len(others), died + LIMIT - time.monotonic())
        told = {int(rank): (float(when), text) for rank, word, when, text in self._lines(job) if word == "error"}
        for rank in sorted(others):
            if rank not in told:
                self.faults.append(f"{where}: rank {rank} had not ended after {LIMIT:g} s; {self._lines(job)}")
                continue
            when, text = told[rank]
            self.slowest = max(self.slowest, when - died)
            kind = text.partition(":")[0]
            self.kinds[kind] += 1
            if kind not in ("TransportError", "RankError") or f"rank {job.victim} is gone" not in text:
                self.faults.append(f"{where}: rank {rank} was told: {text}")

    def _lines(self, job: Job) -> list[list[str]]:
        """Return what the ranks have said: rank, word, time, text."""
        try:
            text = Path(job.says).read_text()
        except FileNotFoundError:
            return []
        return [(*line.split(" ", 3), "")[:4] for line in text.splitlines()]  # type: ignore[misc]

    def _wait(self, job: Job, word: str, count: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while sum(row[1] == word for row in self._lines(job)) < count:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> int:
    """Kill as often as asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=100, help="100 by default")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of pipelines; 2 and 4 by default")
    arguments.add_argument("--seed", type=int, default=0, help="of all that is random")
    args = arguments.parse_args()
    cases = [
        (schedule, store, world, width)
        for schedule in SCHEDULES
        for store in STORES
        for world in args.ranks
        for width in WIDTHS
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipe-kill-") as folder:
        drill = Drill(Path(folder), args.seed)
        for number in range(args.kills):
            if number % len(cases) == 0:
                drill.random.shuffle(cases)
            drill.kill(*cases[number % len(cases)])
            if len(drill.faults) > 20:
                print("too many faults, so no more are looked for")
                break
    for fault in drill.faults:
        print(f"FAULT {fault}")
    print(f"errors of the ranks that were left: {dict(drill.kinds)}; the slowest came {drill.slowest:.2f} s after")
    print(f"{args.kills} kills, {len(drill.faults)} faults, {time.monotonic() - begun:.0f} s")
    return 1 if drill.faults else 0


if __name__ == "__main__":
    sys.exit(main())
