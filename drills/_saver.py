"""A process that saves step after step until it is killed, and says in a file which steps are safe.

Savers are forked from a server that has imported everything, so that one costs a tenth of a second, not three.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _processes
import torch
import torch.distributed as dist
from _values import TENSORS, difference, local_value, make, state_of
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale_ckpt as ck

__all__ = ["Config", "Job", "start"]

CHUNK_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Config:
    """How a saver saves."""

    name: str
    """For the table."""
    call: str = "save"
    """"save", "async_save", "Checkpointer" (which collects garbage too), or "again": every step twice."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the call."""
    fsync: bool = False
    """Whether files are made durable."""

    @property
    def removes(self) -> bool:
        """Whether old steps go."""
        return self.call == "Checkpointer"


@dataclass(frozen=True, slots=True)
class Job:
    """What a saver is told."""

    root: str
    """The store."""
    seed: int
    """Of the values."""
    config: Config
    """How to save."""
    world: int
    """Number of ranks."""
    address: str
    """Where the ranks meet: a file, or tcp://host:port."""
    says: str
    """File to which it appends a line for every event."""
    log: str
    """File that gets what it prints."""
    timeout: float
    """Seconds to wait for other ranks in a save."""
    steps: int = 400
    """Most steps, in case that nobody kills it."""


def start(job: Job) -> list[multiprocessing.process.BaseProcess]:
    """Start a process for each rank."""
    return _processes.start(job.world, run, job, "_warm")


def run(job: Job, rank: int) -> None:
    """Be one rank."""
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = os.open(job.says, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words: object) -> None:
        os.write(told, f"{rank} {' '.join(map(str, words))}\n".encode())  # one write, so that a line is whole or absent

    torch.set_num_threads(1)
    try:
        _save_steps(job, rank, say)
    except BaseException as error:  # noqa: BLE001 - the drill judges it
        traceback.print_exc()
        say("error", type(error).__name__, str(error).replace("\n", " "))
    sys.stderr.flush()
    os._exit(0)


def _save_steps(job: Job, rank: int, say: Callable[..., None]) -> None:
    if job.world > 1:
        dist.init_process_group("gloo", store=_meet(job), rank=rank, world_size=job.world)
    place = _places(job.world, rank)

    def state(step: int) -> dict[str, Any]:
        return state_of(job.seed, step, place, ck.local, rank)

    target = state(-1)
    saved_by = _world_of_latest(job.root)
    with ck.Checkpointer(job.root, timeout=60.0, fsync=job.config.fsync) as checkpointer:
        # Where another number of ranks has saved, what each kept for itself has no owner here.
        last = checkpointer.restore(target, missing_ok=True, local="keep")
    if last is not None and (wrong := _wrong(job, last, target, place, rank, own=saved_by == job.world)):
        say("wrong", f"restored step {last}: {wrong}")
    say("ready", -1 if last is None else last)
    first = 0 if last is None else last + 1
    save = _save_calls(job, say)
    for step in range(first, first + job.steps):
        save(step, state(step))
    say("end")


def _save_calls(job: Job, say: Callable[..., None]) -> Callable[[int, Any], None]:
    """Return what saves a step and says which one is safe then."""
    config = job.config
    options = {"chunk_bytes": CHUNK_BYTES, "fsync": config.fsync, "timeout": job.timeout, **config.options}
    saved = itertools.count()
    if config.call == "Checkpointer":
        checkpointer = ck.Checkpointer(job.root, keep=ck.Keep(last=2), **options)

        def keep(step: int, state: Any) -> None:
            done = checkpointer.save(step, state)
            if isinstance(done, ck.SaveInfo):
                say("saved", step)
            elif next(saved):
                say("saved", step - 1)  # the one before was waited for

        return keep

    def save(step: int, state: Any) -> None:
        if config.call == "async_save":
            handle = ck.async_save(job.root, state, step=step, **options)
            for tensor in (t for t in state["model"].values() if type(t) is Tensor):
                tensor.zero_()  # the state may be changed at once
            handle.wait()
        else:
            ck.save(job.root, state, step=step, **options)
        say("saved", step)
        if config.call == "again":
            ck.save(job.root, state, step=step, overwrite=True, **options)
            say("saved", step)

    return save


def _meet(job: Job) -> Any:
    wait = datetime.timedelta(seconds=60)
    if not job.address.startswith("tcp://"):
        return FileStore(job.address, job.world)
    host, _, port = job.address.removeprefix("tcp://").rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=wait)
    return PrefixStore(Path(job.says).name, store)


def _places(world: int, rank: int) -> Callable[[str, Tensor], Any]:
    """Return what makes a rank's part of a whole tensor."""
    if world == 1:
        return lambda _, whole: whole
    line = init_device_mesh("cpu", (world,))
    layouts: dict[str, tuple[DeviceMesh, tuple[Any, ...]]] = {
        "rows": (line, (Shard(0),)),
        "columns": (line, (Shard(1),)),
        "replica": (line, (Replicate(),)),
        "grid": (init_device_mesh("cpu", (2, world // 2)), (Shard(0), Shard(1))),
    }

    def place(name: str, whole: Tensor) -> Any:
        layout = TENSORS[name].layout
        if layout == "plain":
            return whole
        mesh, placements = layouts[layout]
        part = whole
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                cuts = part.chunk(mesh.size(axis), placement.dim)
                part = cuts[mesh.get_local_rank(axis)]
        return DTensor.from_local(
            part.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    return place


def _world_of_latest(root: str) -> int | None:
    try:
        with ck.open(root) as checkpoint:
            return checkpoint.manifest.world
    except ck.MissingStepError:
        return None


def _wrong(
    job: Job, step: int, target: dict[str, Any], place: Callable[[str, Tensor], Any], rank: int, *, own: bool
) -> str:
    """Return in what that which was restored differs from what must be there, on this rank."""
    for name, found in target["model"].items():
        wanted = place(name, make(job.seed, step, name)) if name != "tied" else target["model"]["replica"]
        one, other = (value.to_local() if isinstance(value, DTensor) else value for value in (found, wanted))
        if text := difference(one, other, name):
            return text
    if (target["step"], target["log"]["name"]) != (step, f"run {job.seed}"):
        return f"the values {target['step']}, {target['log']}"
    return difference(target["own"].value, local_value(job.seed, step, rank), "own") if own else ""
