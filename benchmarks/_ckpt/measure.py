"""Measuring saves and loads: rounds in random order, pages warmed before each write, CPU-seconds and bytes.

A virtual machine hands out pages that were not touched lately at up to 2 s/GiB, and the first writer pays. So a dummy
file of the size of the state is written and removed before each timed save, and as much memory, for every system alike.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _timing import Report, row
from torch import Tensor

State = dict[str, Tensor]
MIB = 1 << 20
TENSORS = 64
"""Tensors of the state; 6 of them are 9 %."""


@dataclass
class Spent:
    """What one save or load took."""

    blocking: float = 0.0
    """Seconds until the call returned and the state could be changed again."""
    total: float = 0.0
    """Seconds until everything was done, for a save: durable."""
    cpu: float = 0.0
    """CPU-seconds of the process and of its living children."""
    bytes: int = 0
    """Bytes in files, or bytes read from files."""
    disk: int = 0
    """Bytes that came from the disk and not from the page cache."""


@dataclass
class Rounds:
    """What each system spent, one entry per round; entries of one round belong together."""

    spent: dict[str, list[Spent]] = field(default_factory=dict)

    def add(self, name: str, spent: Spent) -> None:
        """Keep a measurement."""
        self.spent.setdefault(name, []).append(spent)

    def median(self, name: str, what: str = "total") -> float:
        """Median of a field."""
        return statistics.median(getattr(s, what) for s in self.spent[name])

    def sum(self, name: str, what: str = "bytes") -> float:
        """Sum of a field over the rounds."""
        return sum(getattr(s, what) for s in self.spent[name])

    def ratio(self, name: str, base: str, what: str = "total") -> float:
        """Median over the rounds of how many times as much of something `name` spends as `base`."""
        pairs = zip(self.spent[name], self.spent[base], strict=True)
        return statistics.median(getattr(a, what) / max(getattr(b, what), 1e-9) for a, b in pairs)

    def note(self, name: str) -> str:
        """Spell the medians of all fields."""
        text = f"{self.median(name, 'total'):.3f} s, {self.median(name, 'cpu'):.2f} CPU-s"
        text += f", {self.median(name, 'bytes') / MIB:.0f} MiB"
        if self.median(name, "blocking"):
            text = f"blocks {self.median(name, 'blocking'):.3f} s, total " + text
        if self.median(name, "disk"):
            text += f", {self.median(name, 'disk') / MIB:.0f} of them from disk"
        return text


@dataclass
class Setup:
    """What every row needs."""

    report: Report
    folder: Path
    """A folder on the disk to measure; rows work in subfolders that they remove."""
    size: int
    """Bytes of the state."""
    rounds: int
    """How often each thing is measured."""
    slow: bool = False
    """Whether to run what takes minutes and gigabytes too."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Systems that are not there, and why."""

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a folder that goes away."""
        path = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def warm_pages(self) -> None:
        """Touch the pages that what follows will get: twice the size, for the file and for a copy in fresh memory."""
        path = self.folder / "dummy"
        block = bytes(16 * MIB)
        with path.open("wb", buffering=0) as file:
            for _ in range(-(-self.size // len(block))):
                file.write(block)
            os.fsync(file.fileno())
            torch.empty(self.size, dtype=torch.uint8).fill_(1)
        path.unlink()

    def orders(self, names: Sequence[str], rounds: int | None = None, seed: int = 0) -> Iterator[list[str]]:
        """Yield the systems in a new random order for each round; the same on all ranks."""
        dice = random.Random(seed)
        for _ in range(self.rounds if rounds is None else rounds):
            yield dice.sample(names, len(names))


def shapes(size: int, itemsize: int = 4) -> dict[str, tuple[int, int]]:
    """Name the matrices of a state of `size` bytes, about as high as wide."""
    numel = size // TENSORS // itemsize
    columns = 1 << max(5, (numel.bit_length() - 1) // 2)
    return {f"layer.{i:02d}.weight": (numel // columns, columns) for i in range(TENSORS)}


def make_state(size: int, dtype: torch.dtype = torch.float32, fill: float | None = None) -> State:
    """Make matrices like trained weights, N(0, 0.02), or filled with one value, of `size` bytes together."""
    wanted = shapes(size, dtype.itemsize)
    if fill is not None:
        return {name: torch.full(shape, fill, dtype=dtype) for name, shape in wanted.items()}
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).mul_(0.02).to(dtype) for name, shape in wanted.items()}


def change(tensors: Iterable[Tensor], step: int) -> None:
    """Change nearly every element, and the distribution hardly."""
    for tensor in tensors:
        tensor.add_(1e-3 if step % 2 else -1.1e-3)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Sum the bits: the same for one whole and for the sum of its shards."""
    return sum(int(t.contiguous().view(torch.int32).sum(dtype=torch.int64)) for t in tensors)


def cpu_seconds() -> float:
    """CPU-seconds of this process and of its children that live, threads included."""
    return time.process_time() + sum(_cpu_of(child) for child in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(tasks).split()):
            yield child
            yield from _descendants(child)


def _cpu_of(pid: int) -> float:
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _text(path: Path) -> str:
    """Read a file of a thread or process; "" if that has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def io_count(name: str) -> int:
    """Read a counter of this process: rchar and wchar for files (not sockets, not mmap), read_bytes for the disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        key, _, value = line.partition(": ")
        if key == name:
            return int(value)
    raise KeyError(name)


def folder_bytes(folder: Path) -> int:
    """Sum the sizes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the clean pages of all files below a folder: needs no root."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_files(folder: Path) -> None:
    """Make the files of a folder durable, for systems that do not."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def timed_save(save: Callable[[], None], wait: Callable[[], None], root: Path) -> Spent:
    """Measure a save that may go on in the background."""
    before = folder_bytes(root)
    with quiet():
        cpu, start = cpu_seconds(), time.perf_counter()
        save()
        blocking = time.perf_counter() - start
        wait()
        total = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
    return Spent(blocking, total, cpu, folder_bytes(root) - before)


def timed_load(load: Callable[[], None]) -> Spent:
    """Measure a load."""
    with quiet():
        read, disk, cpu, start = io_count("rchar"), io_count("read_bytes"), cpu_seconds(), time.perf_counter()
        load()
        total = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
    return Spent(0.0, total, cpu, io_count("rchar") - read, io_count("read_bytes") - disk)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Python's garbage collection and its output buffers out of what is timed."""
    sys.stdout.flush()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def summary(setup: Setup, rounds: Rounds, name: str, base: str, text: str) -> None:
    """Report all that a system took, and its seconds over those of a base."""
    if name not in rounds.spent or base not in rounds.spent:
        setup.report.add(row(f"{text}: {name}", None, None, setup.skipped.get(name, "not measured")))
    else:
        setup.report.add(row(f"{text}: {name}", rounds.ratio(name, base), None, rounds.note(name)))


def compare(
    setup: Setup, rounds: Rounds, ours: str, base: str, text: str, goal: float | None = None, what: str = "total"
) -> None:
    """Report the ratio of two systems."""
    label = f"{text}: {ours} / {base}" + {"total": "", "cpu": ", CPU", "blocking": ""}[what]
    missing = [name for name in (ours, base) if name not in rounds.spent]
    if missing:
        setup.report.add(row(label, None, goal, setup.skipped.get(missing[0], "not measured")))
        return
    note = f"{rounds.median(ours, what):.3f} / {rounds.median(base, what):.3f} s"
    setup.report.add(row(label, rounds.ratio(ours, base, what), goal, note))
