"""Rows on real gloo ranks: a training step of one model under torch's strategies and ours, in turns, step by step.

"no sync" lets each rank train alone: the floor. The best of torch's variants is what ours are compared with.
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _process import forget_peak, resident, timed_together
from _timing import Report, row
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from vescale_comm._fsdp import fully_shard
from vescale_comm._optimizer import DistributedOptimizer
from vescale_comm._replicate import DistributedDataParallel

WORLDS, BATCHES = (2, 4), (1, 4)
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 6, 256, 4, 1024, 64
"""5.3 million parameters: 20 MiB of gradients."""
WARM_UP = 3
MIB = 1 << 20


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class System:
    """A model and its optimizer under some strategy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _alone(model: nn.Module) -> System:
    return System(model, _adamw(model))


def _torch_ddp(model: nn.Module, **options: Any) -> System:
    return System(TorchDDP(model, **options), _adamw(model))


def _torch_zero(model: nn.Module) -> System:
    wrapped = TorchDDP(model, gradient_as_bucket_view=True)
    cls, options = torch.optim.AdamW, {"lr": 1e-3, "fused": True, "parameters_as_bucket_view": True}
    return System(wrapped, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, **options))


def _torch_fsdp(model: nn.Module, **options: Any) -> System:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        torch_fully_shard(block, mesh=mesh, **options)
    torch_fully_shard(model, mesh=mesh, **options)
    return System(model, _adamw(model))


def _ddp(model: nn.Module, **options: Any) -> System:
    return System(DistributedDataParallel(model, **options), _adamw(model))


def _zero(model: nn.Module, **options: Any) -> System:
    return System(model, DistributedOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, **options))


def _fsdp(model: nn.Module, **options: Any) -> System:
    fully_shard(model, **options)
    return System(model, _adamw(model))


SYSTEMS: dict[str, Callable[[nn.Module], System]] = {
    "no sync": _alone,
    "torch ddp": _torch_ddp,
    "torch ddp, views": partial(_torch_ddp, gradient_as_bucket_view=True),
    "torch ddp, views, static": partial(_torch_ddp, gradient_as_bucket_view=True, static_graph=True),
    "torch ddp, views, 4 MB": partial(_torch_ddp, gradient_as_bucket_view=True, bucket_cap_mb=4),
    "torch zero": _torch_zero,
    "torch fsdp2": _torch_fsdp,
    "torch fsdp2, no reshard": partial(_torch_fsdp, reshard_after_forward=False),
    "ddp p2p": partial(_ddp, transport="p2p"),
    "ddp shared": partial(_ddp, transport="shared"),
    "zero 1 p2p": partial(_zero, zero=1, transport="p2p"),
    "zero 2 p2p": partial(_zero, zero=2, transport="p2p"),
    "zero 1 shared": partial(_zero, zero=1, transport="shared"),
    "zero 2 shared": partial(_zero, zero=2, transport="shared"),
    "zero 1 shared, parameters once": partial(_zero, zero=1, transport="shared", share_parameters=True),
    "fsdp p2p": partial(_fsdp, transport="p2p"),
    "fsdp p2p, no reshard": partial(_fsdp, transport="p2p", reshard_after_forward=False),
    "fsdp shared": partial(_fsdp, transport="shared"),
}
BEST = {
    "best torch ddp": [name for name in SYSTEMS if name.startswith("torch ddp")],
}
GOALS: dict[str, tuple[str, dict[int, float]]] = {
    # ours: beside what, and goals by batch size
    "ddp p2p": ("best torch ddp", {1: 1.0, 4: 1.0}),
    "ddp shared": ("best torch ddp", {1: 0.78, 4: 0.90}),
    "zero 1 p2p": ("best torch ddp", {1: 0.85, 4: 0.95}),
    "zero 2 p2p": ("best torch ddp", {1: 0.85, 4: 0.95}),
    "zero 1 shared": ("best torch ddp", {}),
    "zero 2 shared": ("best torch ddp", {}),
    "zero 1 shared, parameters once": ("best torch ddp", {1: 0.68, 4: 0.86}),
    "fsdp p2p": ("torch fsdp2", {1: 0.60, 4: 0.68}),
    "fsdp p2p, no reshard": ("torch fsdp2, no reshard", {}),
    "fsdp shared": ("torch fsdp2", {}),
}
MEMORY = {
    "ddp p2p": "torch ddp, views",
    "zero 1 p2p": "torch zero",
    "zero 2 p2p": "torch zero",
    "fsdp p2p": "torch fsdp2",
}
Spent = dict[str, list[tuple[float, float]]]
"""Per system and round: seconds of the slowest rank, and CPU-seconds of all ranks together."""


def training(
    report: Report, seconds: float = 60, worlds: Sequence[int] = WORLDS, batches: Sequence[int] = BATCHES
) -> None:
    """Report step times, CPU times and peak memory as shares of torch's.

    Args:
        report: takes the rows.
        seconds: about how long each number of ranks and batch size is measured.
        worlds: numbers of ranks.
        batches: sequences of each rank in a step.
    """
    for world in worlds:
        for batch in batches:
            report.heading(
                f"training, {world} ranks, batch {batch}: time of a step over torch's best (10th percentile)"
            )
            spent: Spent = on_ranks(_time_steps, world, (batch, seconds))
            _step_rows(report, spent, world, batch)
        _memory_rows(report, world)


def _step_rows(report: Report, spent: Spent, world: int, batch: int) -> None:
    times = {name: tenth([wall for wall, _ in rounds]) for name, rounds in spent.items()}
    busy = {name: tenth([cpu for _, cpu in rounds]) for name, rounds in spent.items()}
    for best, names in BEST.items():
        winner = min(names, key=lambda name: times[name])
        times[best], busy[best] = times[winner], busy[winner]
    floor = times["no sync"]
    label = f"{world} ranks, batch {batch}"
    for name in SYSTEMS:
        base, goals = GOALS.get(name, ("best torch ddp", {}))
        note = f"{times[name] * 1e3:.1f} ms, {times[name] / floor:.2f} of no sync, CPU {busy[name] / busy[base]:.2f}"
        report.add(row(f"step, {name}, {label}", times[name] / times[base], goals.get(batch), note))
    for name in ("ddp p2p", "zero 1 p2p", "zero 2 p2p", "fsdp p2p"):
        base = GOALS[name][0]
        report.add(row(f"CPU, {name} over {base}, {label}", busy[name] / busy[base], 1.0))


def _memory_rows(report: Report, world: int) -> None:
    report.heading(f"peak memory of a rank, {world} ranks, over that of torch's counterpart (model included)")
    with torch.device("meta"):
        size = sum(p.numel() for p in GPT().parameters()) * 4
    peaks = {name: on_ranks(_peak, world, (name,)) for name in dict.fromkeys([*MEMORY, *MEMORY.values()])}
    for ours, theirs in MEMORY.items():
        note = f"{peaks[ours] / MIB:.0f} / {peaks[theirs] / MIB:.0f} MiB; the parameters are {size / MIB:.0f}"
        report.add(row(f"memory, {ours} over {theirs}, {world} ranks", peaks[ours] / peaks[theirs], 1.0, note))


def tenth(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def on_ranks(work: Callable[..., Any], world: int, job: tuple[Any, ...]) -> Any:
    with tempfile.TemporaryDirectory(prefix="bench-comm-") as folder:
        start_processes(_rank, (world, folder, work, job), world, start_method="spawn")
        return pickle.loads((Path(folder) / "result.pickle").read_bytes())


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], job: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    result = work(rank, world, *job)
    if rank == 0:
        (Path(folder) / "result.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    # Threads of several process groups are still there; leaving at once keeps their order of ending out of it.
    os._exit(0)


def batches_of(rank: int, batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=generator) for _ in range(4)]


def _time_steps(rank: int, world: int, batch: int, seconds: float) -> Spent:
    torch.manual_seed(0)
    base = GPT()
    systems = {name: make(deepcopy(base)) for name, make in SYSTEMS.items()}
    batches = batches_of(rank, batch)
    for system in systems.values():
        for tokens in batches[:WARM_UP]:
            system.step(tokens)
    spent: Spent = {name: [] for name in systems}
    end, number, going = time.monotonic() + seconds, 0, torch.ones(1)
    gc.collect()
    gc.disable()
    while going.item():
        for name, system in systems.items():
            spent[name].append(timed_together(partial(system.step, batches[number % 4])))
        number += 1
        going[0] = float(time.monotonic() < end)
        dist.broadcast(going, 0)
    gc.enable()
    return spent


def _peak(rank: int, world: int, name: str) -> float:
    """Return by how many bytes the resident memory of a rank grew at most, from before the model was made."""
    torch.manual_seed(0)
    tiny = nn.Linear(8, 8)
    System(TorchDDP(tiny), _adamw(tiny)).optimizer.zero_grad()  # imports and threads do not count
    batches = batches_of(rank, 1)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    system = SYSTEMS[name](GPT())
    for tokens in batches[:WARM_UP]:
        system.step(tokens)
    grown = torch.tensor(float(resident("VmHWM") - before), dtype=torch.float64)
    everyone = [torch.zeros_like(grown) for _ in range(world)]
    dist.all_gather(everyone, grown)
    return statistics.median(one.item() for one in everyone)
