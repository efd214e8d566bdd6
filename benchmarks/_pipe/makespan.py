"""Rows on stages that sleep: what a step takes over what is simulated, in threads of one process and on gloo ranks."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, row
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from vescale_pipe import Costs, PipeEngine, PipePlan, Schedule, build_schedule, manual, simulate
from vescale_pipe._schedules.registry import BUILT_IN
from vescale_pipe._transport import LocalHub

MICROBATCHES = 8
FORWARD, INPUTS, WEIGHTS = 12e-3, 15e-3, 9e-3
"""Seconds of all layers of a rank."""
WORLDS = (2, 4)
Span = tuple[int, int]


class _Late(torch.autograd.Function):
    """Returns what it gets; its backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class _Stage(nn.Module):
    """A stage whose forward, input gradient and weight gradient take what they are told to."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.share = share
        self.lin.weight.register_hook(lambda grad: time.sleep(WEIGHTS * share))

    def forward(self, x: Tensor) -> Tensor:
        """Return a linear layer's output, late."""
        time.sleep(FORWARD * self.share)
        return _Late.apply(self.lin(x), INPUTS * self.share)  # type: ignore[no-any-return, no-untyped-call]


def makespan(report: Report, rounds: int, folder: Path) -> None:
    """Compare measured and simulated steps of all schedules."""
    for world in WORLDS:
        found = {"threads": {name: _in_threads(name, world, rounds) for name in BUILT_IN}}
        found["gloo ranks"] = _on_ranks(world, rounds, folder)
        for where, times in found.items():
            report.heading(
                f"{world} {where}, {MICROBATCHES} micro-batches, stages that sleep {FORWARD * 1e3:g} (F), "
                f"{INPUTS * 1e3:g} (I), {WEIGHTS * 1e3:g} (W) ms a rank: measured over simulated, the larger first"
            )
            for name, seconds in times.items():
                expected = _simulated(name, world)
                note = f"{seconds * 1e3:.1f} / {expected * 1e3:.1f} ms"
                value = max(seconds / expected, expected / seconds)
                report.add(row(f"makespan, {world} {where}: {name}", value, 1.15, note))


def _schedule(name: str, world: int) -> Schedule:
    return build_schedule(name, world, MICROBATCHES)


def _simulated(name: str, world: int) -> float:
    schedule = _schedule(name, world)
    share = world / schedule.num_stages
    costs = Costs(forward=FORWARD * share, input_grad=INPUTS * share, weight_grad=WEIGHTS * share)
    return simulate(schedule, costs).makespan


def _engine(name: str, world: int, **where: Any) -> tuple[PipeEngine, list[Span]]:
    """Return an engine, and a list that gets start and end of each computation, in nanoseconds."""
    schedule = _schedule(name, world)
    stages = [_Stage(world / schedule.num_stages) for _ in range(schedule.num_stages)]
    plan = PipePlan(schedule=schedule, num_microbatches=MICROBATCHES, loss="sum", timeout=60.0)
    engine = PipeEngine(manual(stages), where.pop("mesh", None), plan, nn.functional.mse_loss, **where)
    spans: list[Span] = []
    engine.record = lambda kind, stage, microbatch, start, end: spans.append((start, end))
    return engine, spans


def _steps(engine: PipeEngine, spans: list[Span], rounds: int, meet: Any) -> list[Span]:
    """Run a step to warm up, and some more; return first start and last end of each."""
    x = torch.zeros(MICROBATCHES, 4)
    found = []
    for _ in range(rounds + 1):
        meet()
        spans.clear()
        engine(x, target=x)
        found.append((min(start for start, _ in spans), max(end for _, end in spans)))
    return found[1:]


def _seconds(ranks: list[list[Span]]) -> float:
    """Return the time from the first start to the last end on all ranks, of the step that was disturbed least."""
    steps = zip(*ranks, strict=True)
    return min(max(e for _, e in step) - min(s for s, _ in step) for step in steps) / 1e9


def _in_threads(name: str, world: int, rounds: int) -> float:
    hub = LocalHub(world, 60.0)
    barrier = threading.Barrier(world)
    found: dict[int, list[Span]] = {}

    def run(rank: int) -> None:
        engine, spans = _engine(name, world, transport=hub.transport(rank))
        found[rank] = _steps(engine, spans, rounds, barrier.wait)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return _seconds([found[rank] for rank in range(world)])


def _on_ranks(world: int, rounds: int, folder: Path) -> dict[str, float]:
    (folder / "rendezvous").unlink(missing_ok=True)
    start_processes(_rank, (world, str(folder), rounds), world, start_method="spawn")
    with (folder / "result.pickle").open("rb") as file:
        found: dict[str, float] = pickle.load(file)
    return found


def _rank(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {}
    for name in BUILT_IN:
        engine, spans = _engine(name, world, mesh=dist.group.WORLD)
        ranks: list[Any] = [None] * world
        dist.all_gather_object(ranks, _steps(engine, spans, rounds, dist.barrier))
        found[name] = _seconds(ranks)
        engine.close()
    if rank == 0:
        with (Path(folder) / "result.pickle").open("wb") as file:
            pickle.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
