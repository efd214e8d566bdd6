"""Rows about plans: the tensor list of Llama 8B with Adam, on ranks that are simulated, and who writes replicas.

The planners themselves run, ours and torch DCP's, on what a rank of such a job would hold; nothing is written. The
plans are not public, so this module looks into both packages.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import time
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist
from _timing import row
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .measure import MIB, Setup, quiet

Shapes = dict[str, tuple[int, ...]]


def llama_8b() -> Shapes:
    """Name the 291 weights of Llama 8B, and the two moments of Adam of each: 873 tensors of float32."""
    block = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    weights: Shapes = {"model.embed_tokens.weight": (128256, 4096)}
    for layer in range(32):
        weights |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    weights |= {"model.norm.weight": (4096,), "lm_head.weight": (128256, 4096)}
    moments = {f"optim.state.{name}.{m}": s for name, s in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    return weights | moments


# ------------------------------------------------------------------ many ranks


def planning(setup: Setup) -> None:
    """Plan a save of one rank of 1,024, and what its rank 0 does for all; DCP's at 64, and with --slow at 1,024."""
    report = setup.report
    report.heading("planning, 873 tensors sharded by rows; seconds and MiB, not ratios")
    try:
        from vescale_ckpt import _save  # noqa: F401
    except ImportError as error:
        setup.skipped["vescale"] = f"not installed: {error.name}"
        report.add(row("vescale, 1,024 ranks: seconds of rank 0", None, 0.1, setup.skipped["vescale"]))
    else:
        rank_0, peak, manifest, index = _plan_vescale(1024)
        report.add(row("vescale, 1,024 ranks: seconds of one rank", rank_0["rank"], 0.1, "describe, digest, assign"))
        report.add(row("vescale, 1,024 ranks: seconds of the manifest", rank_0["manifest"], 0.1, "rank 0, at commit"))
        note = f"manifest {manifest / 1024:.0f} KiB, index of a rank {index / 1024:.0f} KiB"
        report.add(row("vescale, 1,024 ranks: MiB of manifest and index", (manifest + index) / MIB, 0.3, note))
        report.add(row("vescale, 1,024 ranks: MiB at peak in Python", peak / MIB, None, "one rank, while it plans"))
        manifest, _ = _manifest(10240)
        report.add(row("vescale, 10,240 ranks: MB of the manifest", manifest / 1e6, 1.0))
    for world in (64, 1024) if setup.slow else (64,):
        seconds, metadata, plans, loading = _plan_dcp(world)
        note = f"plans {plans / MIB:.0f} MiB; each loader unpickles in {loading:.1f} s"
        report.add(row(f"dcp, {world:,} ranks: seconds of rank 0", seconds, None, note))
        report.add(row(f"dcp, {world:,} ranks: MiB of .metadata", metadata / MIB))


def _plan_vescale(world: int) -> tuple[dict[str, float], int, int, int]:
    """Return seconds, peak of Python's memory, bytes of the manifest, and bytes of one rank's index."""
    from vescale_ckpt._save import plan

    dist.init_process_group("fake", rank=0, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for name, shape in llama_8b().items():
        local = torch.empty(-(-shape[0] // world), *shape[1:])
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )

    def once() -> Any:
        content = plan.describe_state(state, range(world), 0)
        content.digest()
        return plan.assign(content.specs, content, 0)

    times = []
    for _ in range(5):
        with quiet():
            start = time.perf_counter()
            tasks = once()
            times.append(time.perf_counter() - start)
    tracemalloc.start()
    once()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    dist.destroy_process_group()
    manifest, seconds = _manifest(world)
    return {"rank": sorted(times)[2], "manifest": seconds}, peak, manifest, _index(tasks)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _manifest(world: int) -> tuple[int, float]:
    """Return the bytes of a manifest, and the seconds to make it (it is read back and checked, too)."""
    from vescale_ckpt import _format
    from vescale_ckpt._geometry import Mesh, Rule

    rule = Rule(Mesh((world,), range(world)), ("S(0)",))
    shapes = llama_8b()
    writers = tuple(
        _format.WriterRecord(hashlib.sha256(str(rank).encode()).hexdigest(), 100_000 + rank, 98_000_000 + rank, 900)
        for rank in range(world)
    )
    with quiet():
        start = time.perf_counter()
        data = _format.Manifest(
            save_id="3f2a9c1b" * 4,
            step=1000,
            created=1.8e9,
            world=world,
            layouts=(rule,),
            tensors=tuple(_format.TensorRecord(name, "float32", shape, 0) for name, shape in shapes.items()),
            tree={name: {"$tensor": number} for number, name in enumerate(shapes)},
            metadata=None,
            writers=writers,
        ).to_bytes()
        seconds = time.perf_counter() - start
    return len(data), seconds


def _index(tasks: Any) -> int:
    """Return the bytes of a rank's index: chunks of 1 MiB, compressed and unlike each other."""
    from vescale_ckpt import _format

    table, pieces, offset = _format.ChunkTable(), [], 0
    for task in tasks:
        size, first = task.piece.numel * task.itemsize, len(table)
        for begin in range(0, size, MIB):
            raw = min(MIB, size - begin)
            digest = hashlib.sha256(str(offset).encode()).digest()
            table.append(0, offset, max(1, raw * 5 // 6), raw, 1, int.from_bytes(digest[:4], "big"), digest[4:20])
            offset += max(1, raw * 5 // 6)
        pieces.append(_format.PieceRecord(task.number, task.piece, first, len(table) - first))
    file = _format.FileRecord("steps/00001000-3f2a9c1b/data/w00000-0.pack", offset)
    return len(_format.Index(0, ["planes"], [file], pieces, table).to_bytes())


def _plan_dcp(world: int) -> tuple[float, int, int, float]:
    """Return CPU-seconds of rank 0, bytes of metadata, bytes of gathered plans, and seconds to read the metadata."""
    gathered = [pickle.dumps(SavePlan(_items(llama_8b(), world, rank))) for rank in range(world)]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with quiet():
        start = time.process_time()
        plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in gathered])
        for plan in plans:
            pickle.dumps(plan)  # what scatter sends
        metadata.storage_data = {
            item.index: _StorageInfo(f"__{rank}_0.distcp", 1577 * number, 1577)
            for rank, plan in enumerate(plans)
            for number, item in enumerate(plan.items)
        }
        data = pickle.dumps(metadata)
        seconds = time.process_time() - start
        del plans, metadata, planner
        start = time.process_time()
        pickle.loads(data)
        loading = time.process_time() - start
    return seconds, len(data), sum(map(len, gathered)), loading


def _items(shapes: Shapes, world: int, rank: int, sharded: bool = True) -> list[WriteItem]:
    """Make what DCP's local plan of a rank holds."""
    found = []
    for name, shape in shapes.items():
        rows = -(-shape[0] // world) if sharded else shape[0]
        begin = min(shape[0], rows * rank) if sharded else 0
        offsets = torch.Size((begin, *[0] * (len(shape) - 1)))
        sizes = torch.Size((min(rows, shape[0] - begin), *shape[1:]))
        chunk = ChunkStorageMetadata(offsets, sizes)
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(shape))
        index = MetadataIndex(name, offsets) if sharded else MetadataIndex(name)
        kind = WriteItemType.SHARD if sharded else WriteItemType.TENSOR
        found.append(WriteItem(index, kind, tensor_data=data))
    return found


# ------------------------------------------------------------------ replicas


def balance(setup: Setup) -> None:
    """Share the replicated tensors of Llama 8B between writers: the busiest over the mean."""
    shapes = llama_8b()
    weights = {name: shape for name, shape in shapes.items() if not name.startswith("optim.")}
    setup.report.heading("replicas: bytes of the busiest writer over the mean, and how long it takes to find out")
    for chosen in (shapes, weights):
        for world in (8, 64, 256):
            _balance(setup, chosen, world)


def _balance(setup: Setup, shapes: Shapes, world: int) -> None:
    text = f"{len(shapes)} tensors, {world} writers"
    try:
        from vescale_ckpt._geometry import Assignment, Geometry, Mesh, Rule
    except ImportError as error:
        setup.report.add(row(f"{text}: vescale", None, 1.05, f"not installed: {error.name}"))
    else:
        rule = Rule(Mesh((world,), range(world)), ("R",))
        tensors = [Geometry(shape, 4, rule) for shape in shapes.values()]
        start = time.perf_counter()
        loads = [sum(p.numel for _, p in Assignment(tensors).pieces(rank)) for rank in range(world)]
        seconds = (time.perf_counter() - start) / world
        assert sum(loads) == sum(math.prod(shape) for shape in shapes.values())
        note = f"{seconds * 1e3:.1f} ms on each writer, no messages"
        setup.report.add(row(f"{text}: vescale", max(loads) * world / sum(loads), 1.05, note))
    plan = SavePlan(_items(shapes, world, 0, sharded=False))
    start = time.perf_counter()
    plans = dedup_save_plans([plan] * world)
    seconds = time.perf_counter() - start
    loads = [sum(item.tensor_storage_size() or 0 for item in p.items) for p in plans]
    note = f"{seconds * 1e3:.0f} ms on rank 0"
    setup.report.add(row(f"{text}: dcp", max(loads) * world / sum(loads), None, note))
