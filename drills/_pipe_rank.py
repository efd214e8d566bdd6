"""A rank of a pipeline that trains until somebody is killed, and says in a file what it was told then.

Ranks are forked from a server that has imported everything, so that one costs a tenth of a second, not three.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _processes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_pipe import PipeEngine, PipePlan, build_schedule, manual

__all__ = ["Job", "start"]

MICROBATCHES = 6
ROWS = 2
"""Of a micro-batch."""

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of one pipeline are told."""

    name: str
    """Of this run, for the store."""
    schedule: str
    """By name."""
    world: int
    """Ranks."""
    width: int
    """Of layers: messages of small ones go in one piece, of large ones in many."""
    store: str
    """Where ranks meet: "file", "launcher" (the drill keeps it, as torchrun does), or "rank 0"."""
    address: str
    """Path or port."""
    victim: int
    """Rank that dies."""
    after: int | None
    """Computations after which the victim kills itself; None: it is killed from outside."""
    says: str
    """File to which ranks append a line for every event."""


def start(job: Job) -> list[multiprocessing.process.BaseProcess]:
    """Start a process for each rank."""
    return _processes.start(job.world, run, job, "_pipe_rank")


def run(job: Job, rank: int) -> None:
    """Be one rank."""
    log = os.open(f"{job.says}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = os.open(job.says, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(word: str, text: str = "") -> None:
        line = text.replace("\n", " | ")
        os.write(told, f"{rank} {word} {time.monotonic()} {line}\n".encode())  # one write: a line is whole or absent

    try:
        _train(job, rank, say)
    except Exception as error:  # noqa: BLE001 - the drill judges it
        say("error", f"{type(error).__name__}: {error}")
    os._exit(0)


def _train(job: Job, rank: int, say: Callable[..., None]) -> None:
    dist.init_process_group("gloo", store=_meet(job, rank), rank=rank, world_size=job.world)
    torch.manual_seed(0)
    schedule = build_schedule(job.schedule, job.world, MICROBATCHES)
    stages = [nn.Sequential(nn.Linear(job.width, job.width), nn.Tanh()) for _ in range(schedule.num_stages)]
    plan = PipePlan(schedule=schedule, num_microbatches=MICROBATCHES, timeout=600.0)
    engine = PipeEngine(manual(stages), dist.group.WORLD, plan, nn.functional.mse_loss)
    x: Tensor = torch.randn(MICROBATCHES * ROWS, job.width)
    engine(x, target=x)
    say("ready")
    if rank == job.victim and job.after is not None:
        left = job.after

        def count(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                say("dies")
                os.kill(os.getpid(), signal.SIGKILL)

        engine.record = count
    for _ in range(100_000):
        engine(x, target=x)
    say("end")


def _meet(job: Job, rank: int) -> Any:
    if job.store == "file":
        return FileStore(job.address, job.world)
    own = job.store == "rank 0" and rank == 0
    store = TCPStore("127.0.0.1", int(job.address), is_master=own, wait_for_workers=False)
    return PrefixStore(job.name, store)
