"""Rows on real gloo ranks: all contenders in turns, step by step."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _process import timed_together
from _timing import Report, Times
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

from vescale_dtensor import implicit_communication
from vescale_dtensor.errors import StaticWarning

from .contenders import DYNAMIC, STATIC, best_hand, check, collectives, contenders, report_times
from .programs import Sizes

MESHES = ((1, 2), (2, 1), (2, 2), (4, 1))
"""Ranks along dp and tp."""
SMALL = ("block, d=64", "2 layers, d=64")
"""Models of a quick run."""
Spent = dict[str, list[tuple[float, float]]]
"""By contender and round: seconds of the slowest rank, CPU-seconds of all ranks together."""


def models() -> dict[str, Sizes]:
    """Return the models by name."""
    found = {f"block, d={width}": Sizes(0, width) for width in (64, 512)}
    return found | {f"{n} layers, d={width}": Sizes(n, width) for width in (64, 512) for n in (2, 4, 12)}


def ranks(report: Report, seconds: float, quick: bool) -> None:
    """Report the times of steps.

    Args:
        report: takes the rows.
        seconds: about how long each model is measured on each mesh.
        quick: only small models.
    """
    chosen = {name: sizes for name, sizes in models().items() if not quick or name in SMALL}
    for shape in MESHES:
        world = shape[0] * shape[1]
        report.heading(f"train step on {world} gloo ranks, dp {shape[0]} x tp {shape[1]}, over the program by hand")
        for name, (spent, sent) in on_ranks(_measure, shape, (chosen, seconds)).items():
            times = Times({n: [wall for wall, _ in rounds] for n, rounds in spent.items()})
            hand = best_hand(times)
            note = f"CPU {cpu_ratio(spent, STATIC, hand):.2f}, of dynamic {cpu_ratio(spent, DYNAMIC, hand):.2f}"
            note += f"; collectives {' / '.join(str(sent[n]) for n in (hand, STATIC, DYNAMIC))}"
            report_times(report, f"ranks, dp {shape[0]} x tp {shape[1]}, {name}", times, note)


def cpu_ratio(spent: Spent, name: str, base: str) -> float:
    """Median over the rounds of how many times as much CPU time `name` takes as `base`."""
    pairs = zip(spent[name], spent[base], strict=True)
    return statistics.median(a / b for (_, a), (_, b) in pairs)


def on_ranks(work: Callable[..., Any], shape: tuple[int, int], job: tuple[Any, ...]) -> Any:
    """Run `work(mesh, *job)` on new gloo ranks of a mesh (dp, tp), and return what rank 0 returns."""
    with tempfile.TemporaryDirectory(prefix="static-eager-") as folder:
        world = shape[0] * shape[1]
        start_processes(_rank, (shape, folder, work, job), world, start_method="spawn")
        return pickle.loads((Path(folder) / "result.pickle").read_bytes())


def quiet() -> None:
    """Use one thread, and say nothing, except that a static program runs dynamically: then there is nothing to time."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", StaticWarning)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def _rank(rank: int, shape: tuple[int, int], folder: str, work: Callable[..., Any], job: tuple[Any, ...]) -> None:
    quiet()
    world = shape[0] * shape[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    result = work(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), *job)
    if rank == 0:
        (Path(folder) / "result.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    # Threads of several process groups are still there; leaving at once keeps their order of ending out of it.
    os._exit(0)


def _measure(mesh: DeviceMesh, chosen: Mapping[str, Sizes], seconds: float) -> dict[str, tuple[Spent, dict[str, int]]]:
    measured = {}
    for name, sizes in chosen.items():
        with implicit_communication("error"):
            steps = contenders(sizes, mesh)
            check(steps, mesh)
            sent = {n: collectives(step).total() for n, step in steps.items()}
            measured[name] = in_turns(steps, seconds), sent
    return measured


def in_turns(steps: Mapping[str, Callable[[], object]], seconds: float, least: int = 7) -> Spent:
    """Time in turns, in alternating order, each step begun together by all ranks.

    Args:
        steps: by name, the same on all ranks.
        seconds: after which no further round begins.
        least: rounds there are in any case.
    """
    spent: Spent = {name: [] for name in steps}
    order = list(steps.items())
    end, number, going = time.monotonic() + seconds, 0, torch.ones(1)
    gc.collect()
    gc.disable()
    while going.item():
        for name, step in order if number % 2 else order[::-1]:
            spent[name].append(timed_together(step))
        number += 1
        going[0] = float(number < least or time.monotonic() < end)
        dist.broadcast(going, 0)
    gc.enable()
    return spent
