"""Rows on real gloo ranks: a step of the same model, schedule and micro-batches by torch's pipelining and by ours.

What a runtime costs is the CPU time of the thread that drives it, less that of the same forwards and backwards alone.
"""

from __future__ import annotations

import pickle
import random
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, row
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.multiprocessing.spawn import start_processes

from vescale_pipe import PipeEngine, PipePlan, build_schedule, manual

TORCH: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": schedules.ScheduleInterleavedZeroBubble,
    "zb_v": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")
"""One stage per rank."""
WIDTH, ROWS, MICROBATCHES = 16, 4, 32
SMALL, LARGE = 1, 8
"""Blocks of a rank's layers in the two models."""
PAIR_GOALS = {SMALL: 130.0, LARGE: None}


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(torch.relu(self.up(x)))


def stages_of(count: int, blocks: int) -> list[nn.Module]:
    """Make stages of so many blocks each; the same on all ranks."""
    torch.manual_seed(0)
    return [nn.Sequential(*(Block(WIDTH) for _ in range(blocks))) for _ in range(count)]


def runtime(report: Report, rounds: int, ranks: int, folder: Path) -> None:
    """Report both runtimes for every schedule that both have."""
    for blocks in (SMALL, LARGE):
        found = _on_ranks(ranks, (blocks, rounds), folder)
        report.heading(
            f"{ranks} ranks, {blocks} blocks a stage, {MICROBATCHES} micro-batches: ours over torch's pipelining"
        )
        for name, (cpu, wall, compute, pairs, same) in found.items():
            ours, theirs = (statistics.median(cpu[who]) for who in ("ours", "torch"))
            extra = [(seconds - compute) / pairs * 1e6 for seconds in (ours, theirs)]
            note = f"{extra[0]:.0f} / {extra[1]:.0f} us per pair beyond {compute / pairs * 1e6:.0f} us of compute"
            report.add(row(f"{name}: CPU of a step", _ratio(cpu), None, note))
            report.add(row(f"{name}: CPU beyond compute", extra[0] / max(extra[1], 1e-9), 0.5, note))
            if PAIR_GOALS[blocks] is not None:
                report.add(row(f"{name}: us per pair beyond compute; no ratio", extra[0], PAIR_GOALS[blocks]))
            note = f"{statistics.median(wall['ours']) * 1e3:.1f} / {statistics.median(wall['torch']) * 1e3:.1f} ms"
            report.add(row(f"{name}: time of a step", _ratio(wall), 1.0, note))
            report.add(row(f"{name}: gradients differ from torch's by more than 1e-5", float(not same), 0.0))


def _ratio(spent: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(spent["ours"], spent["torch"], strict=True))


def _rank(rank: int, world: int, folder: str, job: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {name: _measure(name, rank, world, *job) for name in TORCH}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        # The busiest rank is what a step waits for.
        worst = {
            name: max((one[name] for one in everyone), key=lambda one: statistics.median(one[0]["ours"]))
            for name in TORCH
        }
        same = {name: all(one[name][4] for one in everyone) for name in TORCH}
        with (Path(folder) / "result.pickle").open("wb") as file:
            pickle.dump({name: (*worst[name][:4], same[name]) for name in TORCH}, file)
    dist.barrier()
    dist.destroy_process_group()


def _measure(name: str, rank: int, world: int, blocks: int, rounds: int) -> tuple[Any, ...]:
    chunks = 1 if name in SINGLE else 2
    modules = stages_of(world * chunks, blocks)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    target = torch.zeros_like(x)
    placement = build_schedule(name, world, MICROBATCHES, chunks=chunks).placement
    mine = [stage for stage, owner in enumerate(placement) if owner == rank]
    ours_modules, torch_modules = deepcopy(modules), deepcopy(modules)
    steps: dict[str, Callable[[], Any]] = {
        "ours": _ours(name, chunks, ours_modules, x, target),
        "torch": _torch(name, mine, torch_modules, x, target),
    }
    cpu: dict[str, list[float]] = {who: [] for who in steps}
    wall: dict[str, list[float]] = {who: [] for who in steps}
    dice = random.Random(5)
    for number in range(rounds + 3):
        for who in dice.sample(sorted(steps), len(steps)):
            dist.barrier()
            start, begun = time.perf_counter(), time.thread_time()
            steps[who]()
            if number >= 3:
                cpu[who].append(time.thread_time() - begun)
                wall[who].append(time.perf_counter() - start)
    same = all(
        torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        for stage in mine
        for a, b in zip(ours_modules[stage].parameters(), torch_modules[stage].parameters(), strict=True)
    )
    return cpu, wall, _compute(modules, mine, rounds), MICROBATCHES * chunks, same


def _compute(modules: list[nn.Module], mine: list[int], rounds: int) -> float:
    """Return the CPU-seconds of this rank's forwards and backwards of a step alone."""
    x = torch.randn(ROWS, WIDTH)
    spent = []
    for _ in range(rounds):
        begun = time.thread_time()
        for stage in mine:
            for _ in range(MICROBATCHES):
                out = modules[stage](x.detach().requires_grad_())
                out.backward(x)
        spent.append(time.thread_time() - begun)
    return statistics.median(spent)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _ours(name: str, chunks: int, modules: list[nn.Module], x: Tensor, target: Tensor) -> Callable[[], Any]:
    plan = PipePlan(schedule=name, num_microbatches=MICROBATCHES, chunks=chunks, loss="sum", keep_outputs=False)
    engine = PipeEngine(manual(modules), dist.group.WORLD, plan, _loss, loss_everywhere=False)

    def step() -> None:
        engine.zero_grad()
        engine(x, target=target)

    return step


def _torch(name: str, mine: list[int], modules: list[nn.Module], x: Tensor, target: Tensor) -> Callable[[], Any]:
    count = len(modules)
    stages = [PipelineStage(modules[stage], stage, count, torch.device("cpu")) for stage in mine]
    made = stages[0] if name in SINGLE else stages
    schedule = TORCH[name](made, MICROBATCHES, loss_fn=_loss, scale_grads=False)
    inputs = (x,) if 0 in mine else ()
    options = {"target": target} if count - 1 in mine else {}

    def step() -> None:
        for stage in mine:
            modules[stage].zero_grad()
        schedule.step(*inputs, **options, return_outputs=False)

    return step


def _on_ranks(world: int, job: tuple[int, int], folder: Path) -> Any:
    (folder / "rendezvous").unlink(missing_ok=True)
    start_processes(_rank, (world, str(folder), job), world, start_method="spawn")
    with (folder / "result.pickle").open("rb") as file:
        return pickle.load(file)
