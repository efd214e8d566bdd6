"""The emulator: bits that differ from real gloo, beside those of summing in rank order, and what a step costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vescale_comm.emulator import all_reduce, emulate, orders

WORLDS = (2, 3, 4, 8)
SIZES = (1, 7, 1000, 65_537, 1_000_003)
STEPS = 10


def bits(report: Report) -> None:
    """Compare sums of gloo, in threads of this process, with emulated ones: share of elements that differ."""
    report.heading("elements whose bits differ from those of gloo's all_reduce, fp32 and bf16 together")
    for world in WORLDS:
        real = _in_threads(world, _real_sums)
        inputs = {(size, dtype): [_numbers(size, rank, dtype) for rank in range(world)] for size, dtype in real}
        for name, goal in (("gloo", 0.0), ("canonical", None)):
            differing = total = 0
            for case, terms in inputs.items():
                found = all_reduce(orders[name], terms)
                differing += int((found.view(-1) != real[case].view(-1)).sum())
                total += found.numel()
            label = "emulated gloo" if name == "gloo" else "rank order"
            report.add(row(f"{world} ranks: {label}", differing / total, goal, f"{differing} of {total}"))


def cost(report: Report, rounds: int) -> None:
    """Compare emulated data parallel training with the same steps of all ranks, one after the other."""
    report.heading("ten steps of all ranks, emulated, over the same without any communication, CPU seconds")
    emulate(_train, 2, args=(True,))
    for world in (4, 16):
        ratios = []
        for _ in range(rounds):
            alone = _seconds(lambda world=world: [_train(rank, False) for rank in range(world)])
            together = _seconds(lambda world=world: emulate(_train, world, args=(True,)))
            ratios.append(together / alone)
        ratios.sort()
        report.add(row(f"{world} ranks of DDP", ratios[len(ratios) // 2], 4.0))


def _train(rank: int, parallel: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    model = DistributedDataParallel(module) if parallel else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).pow(2).mean().backward()
        optimizer.step()


def _seconds(function: Callable[[], Any]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def _real_sums(rank: int, world: int, group: Any) -> dict[tuple[int, torch.dtype], Tensor]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            total = _numbers(size, rank, dtype)
            group.allreduce([total]).wait()
            found[size, dtype] = total
    return found


def _numbers(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return (torch.randn(size, generator=generator) * torch.exp(2 * torch.randn(size, generator=generator))).to(dtype)


def _in_threads(world: int, function: Callable[[int, int, Any], Any]) -> Any:
    """Return what rank 0 of a real gloo group in threads of this process gets."""
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def main(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60))
        results[rank] = function(rank, world, group)

    threads: Sequence[threading.Thread] = [threading.Thread(target=main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0]
