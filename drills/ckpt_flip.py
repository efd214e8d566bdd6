"""Flip single bits of a store: each is found by verify, and no load returns a wrong value.

    python drills/ckpt_flip.py --flips 200 --seed 0

The store holds steps of all kinds: packed and plain, compressed and not, with references to earlier steps and shared
chunks, by one writer and by two. A flip in data has to be told with the name of the tensor. The exit status is 1 if a
flip was not found, gave a wrong value, damaged a step that does not need the byte, or made anything but an error of
vescale_ckpt.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from _check import wrong
from _disk import Chunk, Disk, chunks_of
from _saver import Config, Job, start

import vescale_ckpt as ck

SAVES = [
    (Config("packed"), 1),
    (Config("compressed", options={"compress": "auto"}), 2),
    (Config("shared", options={"dedup": "content"}), 1),
    (Config("shared, compressed", options={"dedup": "content", "compress": "auto"}), 2),
    (Config("plain", options={"layout": "plain"}), 2),
    (Config("packed"), 2),
]
STEPS = 2
"""Steps of each way to save."""
CHUNK_HEADER = 16
"""Bytes of a shared chunk before its data."""
MARKER, COMMIT, MANIFEST, INDEX, PACK = "vckpt.json", "COMMIT", "manifest.json", "index", "pack"
SAFETENSORS, SAFETENSORS_HEADER, SHARED, SHARED_HEADER = "safetensors", "st header", "shared chunk", "chunk header"
KINDS = (MARKER, COMMIT, MANIFEST, INDEX, PACK, SAFETENSORS, SAFETENSORS_HEADER, SHARED, SHARED_HEADER)


@dataclass(slots=True)
class Count:
    """What flips of one kind came to."""

    flips: int = 0
    """Bits that were flipped."""
    verify: int = 0
    """Found by verify."""
    load: int = 0
    """Refused by a load of a step that needs the byte."""
    exact: int = 0
    """Needed by no load: all steps came back bit for bit."""
    same: int = 0
    """Of compressed data that means the same with either value of the bit, so that nothing is damaged."""


class Drill:
    """Flips, judges, and flips back."""

    def __init__(self, store: Path, seed: int) -> None:
        """Take a sound store."""
        self.store, self.seed = store, seed
        self.random = random.Random(seed)
        self.faults: list[str] = []
        """What must not be."""
        self.counts: defaultdict[str, Count] = defaultdict(Count)
        disk = Disk(store)
        self.steps = disk.steps
        self._folders = dict(zip(disk.steps, disk.committed, strict=True))
        self._owners: defaultdict[str, list[Chunk]] = defaultdict(list)
        for folder in disk.committed:
            for chunk in chunks_of(store, folder):
                self._owners[chunk.path].append(chunk)
        self.files = sorted(disk.files)

    def check_sound(self) -> None:
        """Look that all is well before, and between, flips."""
        report = ck.verify(self.store, "all")
        if not report.ok:
            self.faults.append(f"verify of the sound store: {report.problems[:4]}")
        self.faults += [f"step {s} of the sound store: {t}" for s in self.steps if (t := self._wrong(s))]

    def of_kind(self, kind: str) -> tuple[str, int]:
        """Choose a byte of a kind of file, or of part of one."""
        path = self.random.choice([path for path in self.files if kind in self._kinds(path)])
        low, high = self._ranges(path)[kind]
        return path, self.random.randrange(low, high)

    def anywhere(self) -> tuple[str, int]:
        """Choose a byte of any file."""
        path = self.random.choice(self.files)
        return path, self.random.randrange((self.store / path).stat().st_size)

    def kind_of(self, path: str, byte: int) -> str:
        """Return the kind of a byte."""
        return next(kind for kind, (low, high) in self._ranges(path).items() if low <= byte < high)

    def flip(self, path: str, byte: int) -> None:
        """Flip a bit, judge what verify and loads say, and flip it back."""
        bit = self.random.randrange(8)
        kind = self.kind_of(path, byte)
        count = self.counts[kind]
        count.flips += 1
        self._flip(path, byte, bit)
        try:
            self._judge(f"{kind}: bit {bit} of byte {byte} of {path}", kind, count, path, byte)
        finally:
            self._flip(path, byte, bit)

    def _judge(self, what: str, kind: str, count: Count, path: str, byte: int) -> None:
        hit = [chunk for chunk in self._owners[path] if chunk.start <= byte < chunk.stop]
        named = {chunk.tensor for chunk in hit}
        if hit and all(chunk.encoded for chunk in hit) and not any(map(self._wrong_or_refused, self.steps)):
            count.same += 1
            return
        try:
            report = ck.verify(self.store, "all")
        except Exception as error:  # noqa: BLE001 - judged here
            self.faults.append(f"{what}: verify raised {type(error).__name__}: {error}")
        else:
            count.verify += not report.ok
            if report.ok:
                self.faults.append(f"{what}: verify found nothing")
            # One writer's own tensors are told as "rank 0: name".
            if lost := named - {name.rpartition(": ")[2] for name in report.tensors}:
                self.faults.append(f"{what}: verify does not name {sorted(lost)}, but {report.tensors}")
        refused = False
        for step in self.steps:
            folder = self._folders[step]
            needs = {chunk.tensor for chunk in hit if chunk.folder == folder}
            is_own = kind in (COMMIT, MANIFEST, INDEX) and path.startswith(f"{folder}/")
            try:
                text = self._wrong(step)
            except ck.CheckpointError as error:
                refused = True
                if not (needs or is_own or kind == MARKER):
                    self.faults.append(f"{what}: step {step} does not need the byte, but does not load: {error}")
                if needs and not (isinstance(error, ck.CorruptionError) and needs <= {*error.tensors}):
                    self.faults.append(f"{what}: step {step}: the error does not name {sorted(needs)}: {error}")
            except Exception as error:  # noqa: BLE001 - judged here
                self.faults.append(f"{what}: step {step}: a load raised {type(error).__name__}: {error}")
            else:
                if text:
                    self.faults.append(f"{what}: step {step}: SILENTLY WRONG: {text}")
                if needs or is_own:
                    self.faults.append(f"{what}: step {step} needs the byte, but loads")
        count.load += refused
        count.exact += not refused

    def _wrong_or_refused(self, step: int) -> str:
        try:
            return self._wrong(step)
        except Exception as error:  # noqa: BLE001 - judged by who asks for more
            return repr(error)

    def _wrong(self, step: int) -> str:
        return wrong(self.store, self.seed, step, step)

    def _flip(self, path: str, byte: int, bit: int) -> None:
        with open(self.store / path, "r+b") as file:
            file.seek(byte)
            (old,) = file.read(1)
            file.seek(byte)
            file.write(bytes([old ^ 1 << bit]))

    def _kinds(self, path: str) -> tuple[str, ...]:
        return tuple(self._ranges(path))

    def _ranges(self, path: str) -> dict[str, tuple[int, int]]:
        """Return the kinds of bytes of a file, and where they lie."""
        size = (self.store / path).stat().st_size
        if path.startswith("chunks/"):
            return {SHARED_HEADER: (0, CHUNK_HEADER), SHARED: (CHUNK_HEADER, size)}
        if path.endswith(".safetensors"):
            data = min(chunk.start for chunk in self._owners[path])
            return {SAFETENSORS_HEADER: (0, data), SAFETENSORS: (data, size)}
        kind = PACK if path.endswith(".pack") else INDEX if "/index/" in path else Path(path).name
        return {kind: (0, size)}


def make_store(folder: Path, seed: int) -> Path:
    """Save steps in all ways and return where they are."""
    for number, (config, world) in enumerate(SAVES):
        says = folder / f"{number}-says"
        meet, log = str(folder / f"{number}-meet"), folder / f"{number}-log"
        job = Job(str(folder / "store"), seed, config, world, meet, str(says), str(log), timeout=60.0, steps=STEPS)
        for process in start(job):
            process.join()
        if says.read_text().count(" end\n") != world:
            raise RuntimeError(f"{config.name}: a saver failed: {says.read_text()}\n{log.read_text()}")
    return folder / "store"


def main() -> int:
    """Run the drill and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200, help="bits to flip")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices, and of the values")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckpt-flip-") as folder:
        drill = Drill(make_store(Path(folder), args.seed), args.seed)
        drill.check_sound()
        each = args.flips * 9 // 10 // len(KINDS)
        for place in [drill.of_kind(kind) for kind in KINDS for _ in range(each)]:
            drill.flip(*place)
        for _ in range(args.flips - each * len(KINDS)):
            drill.flip(*drill.anywhere())
        drill.check_sound()
    report(drill, time.monotonic() - begun)
    return 1 if drill.faults else 0


def report(drill: Drill, seconds: float) -> None:
    """Print a line per kind, and the sums."""
    titles = ("flips", "found by verify", "refused by load", "not needed, exact", "means the same")
    print(f"{'byte of':14} {titles[0]:>6} {titles[1]:>16} {titles[2]:>16} {titles[3]:>18} {titles[4]:>15}")
    for kind in KINDS:
        count = drill.counts[kind]
        print(f"{kind:14} {count.flips:6} {count.verify:16} {count.load:16} {count.exact:18} {count.same:15}")
    for fault in drill.faults[:40]:
        print(f"FAULT {fault}")
    flips, found, same = (sum(getattr(c, key) for c in drill.counts.values()) for key in ("flips", "verify", "same"))
    print(
        f"{flips} flips, {found} found by verify, {same} that changed nothing, {len(drill.faults)} faults, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
