"""Rows on real gloo ranks: collectives of every transport beside gloo's own, in turns on the same buffers.

"shared" sums buffers that it allocated, "shared, copied" any others.
"""

from __future__ import annotations

import pickle
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _process import cpu_seconds
from _timing import Report, Times, row
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from vescale_comm._transport import PeerTransport, SharedTransport

SIZES = {"1 MiB": 1 << 20, "20 MiB": 20 << 20, "64 MiB": 64 << 20}
WORLDS = (2, 4)
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
OURS = ("p2p", "shared", "shared, copied")
GOALS = {
    ("reduce_scatter", "20 MiB", "p2p", 2): 1 / 2.3,
    ("reduce_scatter", "20 MiB", "p2p", 4): 1 / 2.3,
    ("all_gather", "20 MiB", "p2p", 2): 1 / 2.3,
    ("all_gather", "20 MiB", "p2p", 4): 1 / 1.4,
    ("reduce_scatter", "20 MiB", "shared", 2): 0.2,
    ("reduce_scatter", "20 MiB", "shared", 4): 0.2,
    ("all_reduce", "20 MiB", "shared", 2): 0.35,
    ("all_reduce", "20 MiB", "shared", 4): 0.35,
}
"""Time as a share of gloo's own."""

# The old names warn since torch 2.13, the new ones are not in torch 2.11.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Calls = dict[str, Callable[[], object]]


def collectives(report: Report, rounds: int = 30, worlds: Sequence[int] = WORLDS) -> None:
    """Report time and CPU time of each collective as a share of gloo's own.

    Args:
        report: takes the rows.
        rounds: calls of each contender; large buffers get a third.
        worlds: numbers of ranks.
    """
    for world in worlds:
        report.heading(f"collectives on {world} ranks: ours over gloo's own")
        with tempfile.TemporaryDirectory(prefix="bench-comm-") as folder:
            start_processes(_rank, (world, folder, rounds), world, start_method="spawn")
            wall, cpu = pickle.loads((Path(folder) / "result.pickle").read_bytes())
        for (operation, size), times in wall.items():
            busy = cpu[operation, size]
            for name in OURS:
                note = f"{times.median(name) * 1e3:.2f} / {times.median('gloo') * 1e3:.2f} ms"
                note += f", CPU {busy.ratio(name, 'gloo'):.2f}"
                goal = GOALS.get((operation, size, name, world))
                report.add(row(f"{operation} {size}, {name}, {world} ranks", times.ratio(name, "gloo"), goal, note))


def _rank(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    wall, cpu = {}, {}
    for name, nbytes in SIZES.items():
        for operation in OPERATIONS:
            calls = _contenders(operation, nbytes // 4 // world * world, rank, world)
            turns = rounds if nbytes <= 20 << 20 else -(-rounds // 3)
            wall[operation, name], cpu[operation, name] = in_turns(calls, turns)
            del calls
    if rank == 0:
        (Path(folder) / "result.pickle").write_bytes(pickle.dumps((wall, cpu)))
    dist.barrier()
    dist.destroy_process_group()


def _contenders(operation: str, numel: int, rank: int, world: int) -> Calls:
    peers, shared = PeerTransport(dist.group.WORLD), SharedTransport(dist.group.WORLD)
    private = torch.zeros(numel)
    in_shared = shared.allocate(numel, torch.float32, torch.device("cpu"))
    apart = torch.zeros(numel // world)

    def gloo() -> None:
        # As torch's users call them: results in memory of their own.
        if operation == "reduce_scatter":
            reduce_scatter(apart, private)
        elif operation == "all_gather":
            all_gather(private, apart)
        else:
            dist.all_reduce(private)

    def ours(transport: PeerTransport | SharedTransport, buffer: Tensor) -> Callable[[], object]:
        call = getattr(transport, operation)
        return lambda: call(buffer).wait()

    return {
        "gloo": gloo,
        "p2p": ours(peers, private),
        "shared": ours(shared, in_shared),
        "shared, copied": ours(shared, private),
    }


def in_turns(calls: Calls, rounds: int) -> tuple[Times, Times]:
    """Time contenders in random order, each call begun together by all ranks; the slowest rank counts."""
    names = sorted(calls)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    dice = random.Random(7)
    for number in range(rounds + 2):
        for name in dice.sample(names, len(names)):
            dist.barrier()
            busy, start = cpu_seconds(), time.perf_counter()
            calls[name]()
            spent = torch.tensor([time.perf_counter() - start, cpu_seconds() - busy], dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if number >= 2:
                wall[name].append(spent[0].item())
                cpu[name].append(spent[1].item())
    return Times(wall), Times(cpu)
