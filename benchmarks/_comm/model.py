"""Rows on real gloo ranks: step times that the cost model predicts beside measured ones.

The model gets what `calibrate` measures on these ranks, and what a step costs without communication.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _timing import Report, row
from torch.distributed.device_mesh import DeviceMesh

from vescale_comm._mesh import calibrate
from vescale_comm._report import AxisCost, HostCosts, MeshCosts, predict
from vescale_comm._report.modules import module_units

from .training import GPT, SYSTEMS, WARM_UP, System, batches_of, on_ranks, tenth

WORLDS = (2, 4)
STRATEGIES = {
    "ddp p2p": ("ddp", "p2p", {}),
    "ddp shared": ("ddp", "shared", {}),
    "zero 1 p2p": ("zero1", "p2p", {}),
    "zero 1 shared": ("zero1", "shared", {}),
    "fsdp p2p": ("fsdp", "p2p", {}),
    "fsdp p2p, no reshard": ("fsdp", "p2p", {"reshard": False}),
    "fsdp shared": ("fsdp", "shared", {}),
}
GOAL = 0.3
"""Error of a prediction, as a share of the measured time."""
SAMPLES = 5
"""Calibrations, of which the middle counts."""


def model(report: Report, seconds: float = 15.0, worlds: Sequence[int] = WORLDS) -> None:
    """Report by how much predictions are off.

    Args:
        report: takes the rows.
        seconds: about how long steps are measured, for each number of ranks.
        worlds: numbers of ranks.
    """
    for world in worlds:
        report.heading(f"cost model, {world} ranks: error of the predicted step, as a share of the measured one")
        measured, costs, (compute, update) = on_ranks(_measure, world, (seconds,))
        units = module_units(GPT())
        for name, (strategy, kind, options) in STRATEGIES.items():
            found = predict(
                units,
                {"dp": world},
                strategy,
                MeshCosts.from_json(costs[kind]),
                compute_seconds=compute,
                update_seconds=update,
                **options,
            )
            error = abs(found.seconds / measured[name] - 1)
            note = f"{found.seconds * 1e3:.1f} / {measured[name] * 1e3:.1f} ms, {found.exposed * 1e3:.1f} ms exposed"
            report.add(row(f"predicted: {name}, {world} ranks", error, GOAL, note))


def _measure(rank: int, world: int, seconds: float) -> tuple[dict[str, float], dict[str, str], tuple[float, float]]:
    """Return step times, costs by transport; and seconds of forward with backward, and of the update, alone."""
    torch.manual_seed(0)
    base = GPT()
    systems = {name: SYSTEMS[name](deepcopy(base)) for name in STRATEGIES}
    alone = SYSTEMS["no sync"](deepcopy(base))
    batches = batches_of(rank, 1)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for tokens in batches[:WARM_UP]:
        for system in (*systems.values(), alone):
            system.step(tokens)
    costs = [_costs(mesh)]
    steps: dict[str, list[float]] = {name: [] for name in systems}
    parts: list[tuple[float, ...]] = []
    end, number, going = time.monotonic() + seconds, 0, torch.ones(1)
    while going.item():
        tokens = batches[number % len(batches)]
        dist.barrier()
        parts.append(_slowest(_parts_of_a_step(alone, tokens)))
        for name, system in systems.items():
            dist.barrier()
            start = time.perf_counter()
            system.step(tokens)
            steps[name].append(_slowest((time.perf_counter() - start,))[0])
        number += 1
        if number % 16 == 0 and len(costs) < SAMPLES:
            costs.append(_costs(mesh))
        going[0] = float(time.monotonic() < end)
        dist.broadcast(going, 0)
    told = {kind: _median([one[kind] for one in costs]).to_json() for kind in costs[0]}
    compute, update = (tenth(list(values)) for values in zip(*parts, strict=True))
    return {name: tenth(values) for name, values in steps.items()}, told, (compute, update)


def _costs(mesh: DeviceMesh) -> dict[str, MeshCosts]:
    return {kind: calibrate(mesh, transport=kind) for kind in ("p2p", "shared")}


def _median(costs: Sequence[MeshCosts]) -> MeshCosts:
    """Return the middle of what was measured at several times."""
    every = [cost.axes["dp",] for cost in costs]
    first = every[0]
    operations = {name: _middle([cost.operations[name] for cost in every]) for name in first.operations}
    beside = {name: _middle([cost.beside[name] for cost in every if cost.beside]) for name in first.operations}
    host = HostCosts(*_middle([tuple(asdict(cost.host).values()) for cost in costs]))
    axis = AxisCost(first.ranks, operations, first.algorithm, beside, first.stages)  # type: ignore[arg-type]
    return MeshCosts({("dp",): axis}, host)


def _middle(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _parts_of_a_step(system: System, tokens: torch.Tensor) -> tuple[float, float]:
    system.optimizer.zero_grad(set_to_none=True)
    start = time.perf_counter()
    logits = system.model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    computed = time.perf_counter()
    system.optimizer.step()
    return computed - start, time.perf_counter() - computed


def _slowest(seconds: tuple[float, ...]) -> tuple[float, ...]:
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(values.tolist())
