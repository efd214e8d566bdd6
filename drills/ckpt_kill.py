"""Kill savers with SIGKILL at random times: no committed step may be lost, none may be seen half-written.

    python drills/ckpt_kill.py --kills 200 --ranks 1 4 --seed 0

One store sees dozens of kills: each saver goes on from the step that the one before has left. After every kill all
steps are loaded and compared bit for bit with what they must hold, then a garbage collection has to leave nothing that
no step needs. The exit status is 1 if anything was lost, wrong, visible too early, or left over.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _check import wrong
from _disk import Disk, phase_of
from _saver import Config, Job, start
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import vescale_ckpt as ck

CONFIGS = [
    Config("save"),
    Config("save, compress", options={"compress": "auto"}),
    Config("save, fsync", fsync=True),
    Config("save, plain", options={"layout": "plain"}),
    Config("save, content", options={"dedup": "content"}),
    Config("save twice", "again"),
    Config("async", "async_save"),
    Config("async, compress", "async_save", {"compress": "auto"}),
    Config("async, plain", "async_save", {"layout": "plain"}),
    Config("keep 2", "Checkpointer"),
    Config("keep 2, compress", "Checkpointer", {"compress": "auto"}),
    Config("keep 2, content", "Checkpointer", {"compress": "auto", "dedup": "content"}),
    Config("keep 2, content, fsync", "Checkpointer", {"dedup": "content"}, fsync=True),
    Config("keep 2, sync", "Checkpointer", {"async_": False}),
]
PHASES = "between saves, before LEASE, after LEASE, data, index, manifest, COMMIT, after COMMIT, in gc".split(", ")
MARKS = ("LEASE", "data/*", "index/*", "manifest.json", "COMMIT", "REMOVED")
"""Files that show how far a save, or a garbage collection, has come."""
STORE_KILLS = 50
"""Kills that one store sees."""
START = 60.0
"""Seconds within which a saver has to be ready."""


@dataclass(slots=True)
class Tally:
    """What one configuration came to."""

    kills: int = 0
    """Savers that were killed; all ranks of one count once."""
    steps: int = 0
    """Steps that were committed."""
    phases: Counter[str] = field(default_factory=Counter)
    """Where the kills hit."""


@dataclass(slots=True)
class Run:
    """The processes of one saver."""

    job: Job
    """What they were told."""
    processes: list  # type: ignore[type-arg]
    """One per rank."""

    def lines(self) -> list[list[str]]:
        """Return what the ranks have said: rank, word, rest."""
        try:
            text = Path(self.job.says).read_text()
        except FileNotFoundError:
            return []
        return [(*line.split(" ", 2), "")[:3] for line in text.splitlines()]  # type: ignore[misc]

    def wait_until_ready(self) -> None:
        """Wait until all ranks save, or one has ended."""
        end = time.monotonic() + START
        while sum(word == "ready" for _, word, _ in self.lines()) < self.job.world:
            if any(not process.is_alive() for process in self.processes):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"the saver was not ready after {START} s; it said {self.lines()}")
            time.sleep(0.005)

    def kill(self, ranks: list[int]) -> None:
        """Send SIGKILL to some ranks."""
        for rank in ranks:
            process = self.processes[rank]
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left and wait until nothing of it runs."""
        self.kill(list(range(self.job.world)))
        for process in self.processes:
            process.join()


class Drill:
    """Kills, judges, and goes on."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Take a folder for stores, and what all random choices depend on."""
        self.folder, self.seed = folder, seed
        self.random = random.Random(seed)
        self.faults: list[str] = []
        """What must not be."""
        self.errors: Counter[str] = Counter()
        """Errors of ranks that were left alone by a killed one, which is as it should be."""
        self.tallies: defaultdict[tuple[str, int], Tally] = defaultdict(Tally)
        self.store = folder / "none"
        self.checked = 0
        """Steps that were loaded and compared."""
        self._round = 0
        self._meet = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def kill(self, config: Config, world: int) -> None:
        """Start a saver, kill it, and judge what it has left."""
        if self._round % STORE_KILLS == 0:
            self.store = self.folder / f"store{self._round // STORE_KILLS}"
        self._round += 1
        before = Disk(self.store).steps
        one_first = world > 1 and self.random.random() < 0.5
        run = self._run(config, world, patient=not one_first or self.random.random() < 0.5)
        run.wait_until_ready()
        self._kill_some(run, one_first)
        run.end()
        lines = run.lines()
        self._judge_words(run, lines, one_first)
        returned = [int(rest) for _, word, rest in lines if word == "saved"]
        disk = Disk(self.store)
        tally = self.tallies[config.name, world]
        tally.kills += 1
        tally.steps += len(set(disk.steps) - set(before)) if not config.removes else len(set(returned))
        tally.phases[phase_of(disk)] += 1
        self._judge_steps(run, disk, before, returned)
        self._collect()

    def _run(self, config: Config, world: int, *, patient: bool) -> Run:
        name = f"{self.folder}/{self._round:04d}"
        tcp = self.random.random() < 0.5
        address = f"tcp://127.0.0.1:{self._meet.port}" if tcp else f"{name}-meet"
        timeout = 60.0 if patient else 1.0
        job = Job(str(self.store), self.seed, config, world, address, f"{name}-says", f"{name}-log", timeout)
        return Run(job, start(job))

    def _kill_some(self, run: Run, one_first: bool) -> None:
        """Wait for a random time; if one rank is to die before the others, kill it and wait again."""
        delay = self.random.uniform(0, 0.2 if run.job.world == 1 else 0.4)
        time.sleep(delay)
        if self.random.random() < 0.6:
            self._wait_for(self.random.choice(MARKS))
        if one_first:
            run.kill([self.random.randrange(run.job.world)])
            # Long enough, at times, for the others to give up and clean up.
            time.sleep(self.random.uniform(0, 0.4 if run.job.timeout > 5 else 2.0))

    def _wait_for(self, mark: str) -> None:
        """Wait until some save gets as far as `mark`: times between two files would else be hit too seldom."""

        def there() -> set[Path]:
            return set(self.store.glob(f"steps/*/{mark}"))

        before, end = there(), time.monotonic() + 0.5
        while there() <= before and time.monotonic() < end:
            time.sleep(0.0002)
        time.sleep(self.random.choice([0, 0, 0.001, 0.003]))

    def _judge_words(self, run: Run, lines: list[list[str]], killed_one_first: bool) -> None:
        for rank, word, rest in lines:
            if word == "wrong":
                self.fault(run, f"rank {rank}: {rest}")
            elif word == "error":
                kind = rest.partition(" ")[0]
                # A step that a rank could not be told of, or a rank that is gone.
                if not killed_one_first or kind != "RanksError":
                    self.fault(run, f"rank {rank} failed by itself: {rest}")
                self.errors[kind] += 1
            elif word == "end":
                self.fault(run, f"rank {rank} was through before it was killed")

    def _judge_steps(self, run: Run, disk: Disk, before: list[int], returned: list[int]) -> None:
        steps = disk.steps
        safe = max([*returned, *before], default=None)
        if safe is not None and (not steps or steps[-1] < safe):
            self.fault(run, f"step {safe} was committed and is lost; there are {steps}")
        wanted = {safe} if run.job.config.removes and safe is not None else {*before, *returned}
        if lost := wanted - set(steps):
            self.fault(run, f"steps {sorted(lost)} were committed and are lost; there are {steps}")
        if missing := disk.missing():
            self.fault(run, f"committed steps refer to files that are gone: {missing}")
        try:
            self._load(run, steps)
        except (ck.CheckpointError, OSError) as error:
            self.fault(run, f"a step does not load: {type(error).__name__}: {error}")
        for folder in set(disk.all_step_folders) - set(disk.committed):
            try:
                ck.open(self.store, folder.removeprefix("steps/")).close()
            except ck.MissingStepError:
                continue
            self.fault(run, f"{folder} opens, but was not committed")

    def _load(self, run: Run, steps: list[int]) -> None:
        if not steps:
            return
        listed = ck.Checkpointer(self.store).steps()
        if listed != steps:
            self.fault(run, f"the steps {listed} are listed, but {steps} are there")
        report = ck.verify(self.store, "all")
        if not report.ok or [step.step for step in report.steps] != steps:
            self.fault(run, f"verify: {len(report.steps)} steps of {len(steps)}; {report.problems[:4]}")
        if text := self._wrong(steps[-1], "latest"):
            self.fault(run, f"latest: {text}")
        for step in steps[:-1]:
            if text := self._wrong(step, step):
                self.fault(run, f"step {step}: {text}")

    def _wrong(self, step: int, which: int | str) -> str:
        self.checked += 1
        return wrong(self.store, self.seed, step, which)

    def _collect(self) -> None:
        """Collect garbage and look whether all of it, and nothing else, is gone."""
        steps = Disk(self.store).steps
        if not (self.store / "vckpt.json").exists():
            return
        ck.gc(self.store, grace=0, break_leases=True)
        self._judge_garbage(steps, "gc")
        if len(steps) > 6:
            keep = self.random.randint(1, 4)
            ck.gc(self.store, keep=ck.Keep(last=keep), grace=0, break_leases=True)
            self._judge_garbage(steps[-keep:], f"gc that keeps {keep}")
            if not (report := ck.verify(self.store, "all")).ok:
                self.faults.append(f"round {self._round}: verify after gc: {report.problems[:4]}")
            if text := self._wrong(steps[-1], "latest"):
                self.faults.append(f"round {self._round}: latest after gc: {text}")

    def _judge_garbage(self, steps: list[int], what: str) -> None:
        disk = Disk(self.store)
        if disk.steps != steps:
            self.faults.append(f"round {self._round}: {what} has left the steps {disk.steps}, but must leave {steps}")
        if missing := disk.missing():
            self.faults.append(f"round {self._round}: {what} has removed {missing}")
        if garbage := disk.garbage():
            self.faults.append(f"round {self._round}: {what} has left {garbage[:8]}")

    def fault(self, run: Run, text: str) -> None:
        """Note what must not be."""
        job = run.job
        self.faults.append(f"round {self._round} ({job.config.name}, {job.world} ranks, {self.store.name}): {text}")


def main() -> int:
    """Run the drill and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="savers to kill")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices, and of the values")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckpt-kill-") as folder:
        drill = Drill(Path(folder), args.seed)
        cases = [(config, world) for config in CONFIGS for world in args.ranks]
        for number in range(args.kills):
            if number % len(cases) == 0:
                drill.random.shuffle(cases)
            drill.kill(*cases[number % len(cases)])
            if len(drill.faults) > 20:
                print("too many faults, so no more are looked for")
                break
        if not drill.faults and sum(tally.steps for tally in drill.tallies.values()) < args.kills:
            drill.faults.append("the savers were killed before they had saved anything: the drill has shown nothing")
    report(drill, time.monotonic() - begun)
    return 1 if drill.faults else 0


def report(drill: Drill, seconds: float) -> None:
    """Print a line per configuration, and the sums."""
    total: Counter[str] = Counter()
    for (name, world), tally in sorted(drill.tallies.items(), key=lambda item: (item[0][1], item[0][0])):
        where = ", ".join(f"{phase} {tally.phases[phase]}" for phase in PHASES if tally.phases[phase])
        print(f"{world} ranks  {name:24} {tally.kills:3} kills {tally.steps:5} steps committed   {where}")
        total += tally.phases
    for fault in drill.faults:
        print(f"FAULT {fault}")
    kills, steps = (sum(getattr(t, key) for t in drill.tallies.values()) for key in ("kills", "steps"))
    print(f"hit: {', '.join(f'{phase} {total[phase]}' for phase in PHASES)}")
    print(f"ranks that gave up after another was killed: {dict(drill.errors)}")
    print(
        f"{kills} kills, {steps} steps committed, {drill.checked} loads compared bit for bit, "
        f"{len(drill.faults)} faults, {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
