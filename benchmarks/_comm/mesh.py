"""Rows on real gloo ranks: sums over two mesh axes beside torch's all_reduce along each, in turns on equal tensors."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _timing import Report, Times, row
from torch.multiprocessing.spawn import start_processes

from vescale_comm._mesh import PLANS, MeshReducer

from .collectives import in_turns

WORLD = 4
SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
KINDS = ("p2p", "shared")
MANY = 77
"""Tensors of a small model: as many norms."""
GOALS = {("16 MiB", "shared"): 0.7, ("many", "p2p"): 0.2, ("many", "shared"): 0.2}
"""Time as a share of torch's."""


def mesh(report: Report, rounds: int = 30) -> None:
    """Report times of sums over both axes of a 2 x 2 mesh as shares of torch's, and of the plans among themselves.

    Args:
        report: takes the rows.
        rounds: calls of each contender; large tensors get a third.
    """
    report.heading("sums over a 2 x 2 mesh: ours over torch's all_reduce along one axis after the other")
    with tempfile.TemporaryDirectory(prefix="bench-comm-") as folder:
        start_processes(_rank, (folder, rounds), WORLD, start_method="spawn")
        found: dict[str, Times] = pickle.loads((Path(folder) / "result.pickle").read_bytes())
    for size in SIZES:
        times = found[size]
        for kind in KINDS:
            name = f"{kind}, chosen"
            note = f"{times.median(name) * 1e3:.2f} / {times.median('torch') * 1e3:.2f} ms; "
            note += ", ".join(f"{plan} {times.ratio(f'{kind}, {plan}', 'torch'):.2f}" for plan in PLANS)
            report.add(row(f"mesh sum {size}, {kind}", times.ratio(name, "torch"), GOALS.get((size, kind)), note))
    times = found["many"]
    for kind in KINDS:
        note = f"{times.ratio(kind, 'torch, joined by hand'):.2f} of torch's all_reduce of one joined tensor"
        report.add(row(f"{MANY} small tensors, {kind}", times.ratio(kind, "torch"), GOALS.get(("many", kind)), note))


def _rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    device_mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reducers = {kind: MeshReducer(device_mesh, transport=kind) for kind in KINDS}
    groups = [device_mesh.get_group(axis) for axis in (1, 0)]
    found = {}
    for size, nbytes in SIZES.items():
        turns = rounds if nbytes <= 1 << 20 else -(-rounds // 3)
        found[size], _ = in_turns(_sums(nbytes // 4, reducers, groups), turns)
    found["many"], _ = in_turns(_small(reducers), rounds)
    if rank == 0:
        (Path(folder) / "result.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _sums(
    numel: int, reducers: dict[str, MeshReducer], groups: list[dist.ProcessGroup]
) -> dict[str, Callable[[], object]]:
    tensor = torch.zeros(numel)

    def along_each() -> None:
        for group in groups:
            dist.all_reduce(tensor, group=group)

    def ours(kind: str, plan: str | None) -> Callable[[], object]:
        return lambda: reducers[kind].all_reduce([tensor], (0, 1), plan=plan).wait()

    calls: dict[str, Callable[[], object]] = {"torch": along_each}
    for kind in KINDS:
        calls |= {f"{kind}, {plan or 'chosen'}": ours(kind, plan) for plan in (None, *PLANS)}
    return calls


def _small(reducers: dict[str, MeshReducer]) -> dict[str, Callable[[], object]]:
    tensors = [torch.zeros(()) for _ in range(MANY)]

    def each() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def joined() -> None:
        flat = torch.stack(tensors)
        dist.all_reduce(flat)
        torch._foreach_copy_(tensors, list(flat.unbind()))

    def ours(kind: str) -> Callable[[], object]:
        return lambda: reducers[kind].all_reduce(tensors, (0, 1)).wait()

    return {"torch": each, "torch, joined by hand": joined, **{kind: ours(kind) for kind in KINDS}}
