"""Rows on real gloo ranks: loads into other layouts, replicas that are read or written once.

What a rank reads is what the kernel counts for files (`rchar`): sockets and mapped files do not count.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import start_processes

from .measure import (
    Rounds,
    Setup,
    Spent,
    State,
    compare,
    cpu_seconds,
    fingerprint,
    folder_bytes,
    io_count,
    make_state,
    quiet,
    shapes,
)
from .systems import SYSTEMS, hush, make_systems

LAYOUTS = {"rows": 0, "columns": 1, "replicated": None}
READERS = ("vescale", "vescale compressed", "dcp", "torch_checkpointing reshard")


def reshard(setup: Setup) -> None:
    """Save in one process, load as shards of 2 and 4 ranks, and as replicas of 4."""
    state = make_state(setup.size)
    expected = fingerprint(state.values())
    with setup.scratch() as folder:
        systems = make_systems(READERS, folder, setup.skipped)
        for system in systems.values():
            setup.warm_pages()
            system.save(0, state)
            system.wait()
            system.close()
        stored = {name: folder_bytes(folder / name.replace(" ", "-")) for name in systems}
        del state
        for world, layouts in ((4, ("rows", "columns", "replicated")), (2, ("rows", "columns"))):
            job = (str(folder), setup.size, list(systems), layouts, setup.rounds, expected)
            results: dict[str, Rounds] = _on_ranks(world, _load_rank, job, folder)
            for layout in layouts:
                (_replicated_rows if layout == "replicated" else _sharded_rows)(
                    setup, world, layout, results[layout], stored
                )


def _sharded_rows(setup: Setup, world: int, layout: str, rounds: Rounds, stored: dict[str, int]) -> None:
    setup.report.heading(f"saved by 1 rank, loaded by {world} as {layout}: bytes over the state's, seconds over dcp's")
    goals = (1.05, 0.2) if layout == "rows" else (None, 0.5)
    _reader_rows(setup, rounds, f"1 -> {world} {layout}", dict.fromkeys(stored, setup.size), goals)


def _replicated_rows(setup: Setup, world: int, layout: str, rounds: Rounds, stored: dict[str, int]) -> None:
    setup.report.heading(f"{world} replicas load the same: bytes read by all over the bytes stored, seconds over dcp's")
    _reader_rows(setup, rounds, f"{world} replicas", stored, (1.01, None))


def _reader_rows(
    setup: Setup, rounds: Rounds, text: str, needed: dict[str, int], goals: tuple[float | None, float | None]
) -> None:
    """Report bytes and seconds of each reader; the goals are for ours."""
    for name in READERS:
        bytes_goal, seconds_goal = goals if name == "vescale" else (None, None)
        if name not in rounds.spent:
            why = setup.skipped.get(name, "failed")
            setup.report.add(row(f"{text}: {name}, bytes", None, bytes_goal, why))
        else:
            value = rounds.median(name, "bytes") / needed[name]
            setup.report.add(row(f"{text}: {name}, bytes", value, bytes_goal, rounds.note(name)))
        if name != "dcp":
            compare(setup, rounds, name, "dcp", text, seconds_goal)


def _load_rank(
    rank: int, world: int, folder: str, size: int, names: list[str], layouts: Sequence[str], count: int, expected: int
) -> dict[str, Rounds]:
    """Load on one rank; rank 0 returns what all of them spent."""
    mesh = init_device_mesh("cpu", (world,))
    results = {}
    for layout in layouts:
        into = _targets(size, layout, mesh)
        copies = world if layout == "replicated" else 1
        systems: dict[str, Any] = {name: SYSTEMS[name](Path(folder) / name.replace(" ", "-")) for name in names}
        rounds, dice = Rounds(), random.Random(3)
        for number in range(count + 1):
            for name in dice.sample(names, len(names)):
                if name not in systems:
                    continue
                for tensor in into.values():
                    _local(tensor).zero_()
                spent, error = _load_once(systems[name], into)
                sums = _gather((spent, error, fingerprint(map(_local, into.values()))))
                problems = [e for _, e, _ in sums if e]
                if not problems and sum(s for _, _, s in sums) != copies * expected:
                    problems = ["other values than were saved"]
                if problems:  # on all ranks alike
                    del systems[name]
                    if rank == 0:
                        print(f"{name}, {layout} of {world}: {problems[0]}")
                elif number:
                    total = max(s.total for s, _, _ in sums)
                    cpu, read = sum(s.cpu for s, _, _ in sums), sum(s.bytes for s, _, _ in sums)
                    rounds.add(name, Spent(0.0, total, cpu, read))
        results[layout] = rounds
        del into
    return results


def _load_once(system: Any, into: State) -> tuple[Spent, str]:
    error = ""
    dist.barrier()
    with quiet():
        read, cpu, start = io_count("rchar"), cpu_seconds(), time.perf_counter()
        try:
            system.load(0, into)
        except Exception as problem:  # noqa: BLE001 -- a peer that fails is a row
            error = f"{type(problem).__name__}: {str(problem)[:200]}"
        total = time.perf_counter() - start
    return Spent(0.0, total, cpu_seconds() - cpu, io_count("rchar") - read), error


def _targets(size: int, layout: str, mesh: Any) -> dict[str, Any]:
    dim = LAYOUTS[layout]
    if dim is None:
        return {name: torch.zeros(shape) for name, shape in shapes(size).items()}
    made = {}
    for name, shape in shapes(size).items():
        local = list(shape)
        local[dim] //= mesh.size()
        made[name] = DTensor.from_local(torch.zeros(local), mesh, [Shard(dim)], run_check=False)
    return made


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ------------------------------------------------------------------ replicas that are saved


def replicas(setup: Setup) -> None:
    """Save the same state on 2 ranks: bytes of all files, and of the rank that writes most."""
    names = ("vescale", "vescale compressed", "dcp", "dcp tuned", "torch_checkpointing")
    setup.report.heading("2 ranks save the same state, a quarter of it one tensor: bytes over the state's, seconds")
    with setup.scratch() as folder:
        installed = list(make_systems(names, folder, setup.skipped))
        job = (str(folder), setup.size, installed, setup.rounds)
        rounds, shares = _on_ranks(2, _save_rank, job, folder)
    for name in names:
        text, ours = f"2 replicas saved: {name}", name.startswith("vescale")
        if name not in rounds.spent:
            setup.report.add(row(f"{text}, bytes", None, 1.02 if ours else None, setup.skipped.get(name, "failed")))
            continue
        value = rounds.median(name, "bytes") / setup.size
        setup.report.add(row(f"{text}, bytes", value, 1.02 if ours else None, rounds.note(name)))
        most = max(shares[name]) / (sum(shares[name]) / 2)
        setup.report.add(row(f"{text}, busiest / mean", most, 1.05 if ours else None))
    for base in ("dcp", "dcp tuned"):
        compare(setup, rounds, "vescale", base, "2 replicas saved")


def _save_rank(
    rank: int, world: int, folder: str, size: int, names: list[str], count: int
) -> tuple[Rounds, dict[str, list[int]]]:
    state = make_state(size // 4 * 3)
    state["embedding"] = torch.randn(size // 4 // 4096, 1024, generator=torch.Generator().manual_seed(1)) * 0.02
    rounds, dice = Rounds(), random.Random(4)
    shares: dict[str, list[int]] = {}
    roots = {name: Path(folder) / name.replace(" ", "-") for name in names}
    systems = {name: SYSTEMS[name](root) for name, root in roots.items()}
    for step in range(count + 1):
        for tensor in state.values():
            tensor.add_(1e-3 if step % 2 else -1.1e-3)
        for name in dice.sample(names, len(names)):
            if rank == 0:
                Setup(None, Path(folder), size, 1).warm_pages()  # type: ignore[arg-type]
            dist.barrier()
            before = folder_bytes(roots[name])
            dist.barrier()
            with quiet():
                wrote, cpu, start = io_count("wchar"), cpu_seconds(), time.perf_counter()
                systems[name].save(step, state)
                systems[name].wait()
                total, cpu = time.perf_counter() - start, cpu_seconds() - cpu
            parts = _gather((total, cpu, io_count("wchar") - wrote))
            if step and rank == 0:
                size_now = folder_bytes(roots[name]) - before
                rounds.add(name, Spent(0.0, max(p[0] for p in parts), sum(p[1] for p in parts), size_now))
                shares[name] = [p[2] for p in parts]
            if rank == 0:
                systems[name].drop(step - 1 if name.startswith("vescale") else step)
            dist.barrier()
    for system in systems.values():
        system.close()
    return rounds, shares


# ------------------------------------------------------------------ processes


def _on_ranks(world: int, function: Any, job: tuple[Any, ...], folder: Path) -> Any:
    """Run a function on gloo ranks, one thread each, and return what rank 0 returns."""
    result = folder / "result.pickle"
    (folder / "rendezvous").unlink(missing_ok=True)
    start_processes(_rank, (world, str(folder), function, job), world, start_method="spawn")
    with result.open("rb") as file:
        return pickle.load(file)


def _rank(rank: int, world: int, folder: str, function: Any, job: tuple[Any, ...]) -> None:
    hush()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = function(rank, world, *job)
    if rank == 0:
        with (Path(folder) / "result.pickle").open("wb") as file:
            pickle.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
