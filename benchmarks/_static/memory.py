"""Rows on real gloo ranks: peak resident memory of a rank that trains, each contender in processes of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from _process import forget_peak, resident
from _timing import Report, row
from torch.distributed.device_mesh import DeviceMesh

from .contenders import BUCKET, DYNAMIC, STATIC, TORCH_PARALLEL, WARM_UP, contenders
from .programs import Sizes
from .ranks import on_ranks

MESHES = ((1, 2), (2, 2))
MODEL = Sizes(layers=4, width=512, vocabulary=1024, length=128, batch=16)
QUICK = Sizes(layers=2, width=256, length=128, batch=16)
GOAL = 1.05
STEPS = 3
TURNS = 3
"""How often each contender is measured: a peak depends on how the C library happens to lay things out."""
MIB = 1 << 20


def memory(report: Report, seconds: float, quick: bool) -> None:
    """Report by how much the resident memory of a rank grows, over the program by hand.

    Args:
        report: takes the rows.
        seconds: unused.
        quick: a small model on two ranks, measured once.
    """
    sizes = QUICK if quick else MODEL
    for shape in MESHES[:1] if quick else MESHES:
        label = f"memory, dp {shape[0]} x tp {shape[1]}, {sizes.layers} layers, d={sizes.width}"
        report.heading(f"{label}: peak growth of a rank's resident memory, over the program by hand")
        names = (BUCKET, STATIC, DYNAMIC, TORCH_PARALLEL)
        turns = [{name: on_ranks(_peaks, shape, (name, sizes)) for name in names} for _ in range(1 if quick else TURNS)]
        middle = {name: _medians([turn[name] for turn in turns]) for name in names}
        hand = middle[BUCKET]
        for name in names[1:]:
            step, idle, first, _ = (
                f"{a / MIB:.0f} / {b / MIB:.0f} MiB" for a, b in zip(middle[name], hand, strict=True)
            )
            if name == STATIC:
                step += f"; {idle} between steps; the process has {hand[3] / MIB:.0f} before there is a model"
            ratios = _medians([[a / b for a, b in zip(turn[name], turn[BUCKET], strict=True)] for turn in turns])
            report.add(row(f"{label}: {name}, a step", ratios[0], GOAL if name == STATIC else None, step))
            report.add(row(f"{label}: {name}, the first {WARM_UP} steps", ratios[2], None, first))


def _medians(turns: Sequence[Sequence[float]]) -> list[float]:
    """The middle of what was measured in turns, number by number."""
    return [statistics.median(numbers) for numbers in zip(*turns, strict=True)]


def _peaks(mesh: DeviceMesh, name: str, sizes: Sizes) -> tuple[float, float, float, float]:
    """Return bytes: growth in steps after the first ones, between steps, in the first ones; what there was before."""
    tiny = contenders(Sizes(layers=1, width=16), mesh, (name,))[name]
    for _ in range(WARM_UP):  # imports, threads and caches do not count
        tiny()
    before = resident("VmRSS", trim=True)
    step = contenders(sizes, mesh, (name,))[name]
    del step.whole  # the model of one device, from which the parameters come
    resident("VmRSS", trim=True)
    forget_peak()
    for _ in range(WARM_UP):
        step()
    first = resident("VmHWM")
    idle = resident("VmRSS", trim=True)
    forget_peak()
    for _ in range(STEPS):
        step()
    later = resident("VmHWM")
    return _median(later - before), _median(idle - before), _median(first - before), _median(before)


def _median(value: float) -> float:
    """The middle of what the ranks have."""
    every = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([value], dtype=torch.float64))
    return statistics.median(one.item() for one in every)
