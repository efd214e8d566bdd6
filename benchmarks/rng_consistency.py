"""Whether a GPT that is initialized and trained with dropout on 4 ranks has the losses of one device.

    python benchmarks/rng_consistency.py --json rows.json

Starts 4 gloo ranks per mesh. The contenders are vescale_dtensor with vescale_rng installed, and torch's own DTensor
with and without `vescale_rng.single_device()`. All run the model of examples/nanogpt, whose parameters are drawn after
it was made parallel, with attention written out, since torch's DTensor has no rule for the fused operator on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from _timing import Report, parser, row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.multiprocessing.spawn import start_processes

import vescale_dtensor
import vescale_rng

STEPS, BATCH, DROPOUT, SEED = 50, 8, 0.1, 0
SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 32}
MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})
TOLERANCE = 1e-5
OURS, FIXED, TORCH = "vescale_dtensor", "torch's DTensor in single_device()", "torch's DTensor"
EXAMPLE = Path(__file__).parents[1] / "examples" / "nanogpt"


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Tensor:
    """Causal attention in operators that all contenders have."""
    assert is_causal
    length = query.shape[-2]
    mask = torch.full((length, length), -math.inf).triu(1)
    weights = torch.softmax(torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1]) + mask, -1)
    return torch.matmul(F.dropout(weights, dropout_p), value)


def example(name: str) -> ModuleType:
    """Load a file of the example."""
    spec = importlib.util.spec_from_file_location(f"nanogpt_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_parameters(model: Any) -> None:
    """Draw what the constructor draws, in its order."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.initialize()


def torch_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the parameters along tp by torch's DTensor, as in the plan that vescale_dtensor has for this model."""
    columns, rows = ("q_proj", "k_proj", "v_proj", "up"), ("o_proj", "down")

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        last = name.rpartition(".")[2]
        for key, parameter in module.named_parameters(recurse=False):
            along_tp: Any = torch_tensor.Replicate()
            if last in columns:
                along_tp = torch_tensor.Shard(0)
            elif last in rows and key == "weight":
                along_tp = torch_tensor.Shard(1)
            names = mesh.mesh_dim_names or ()
            placements = [along_tp if axis == "tp" else torch_tensor.Replicate() for axis in names]
            setattr(module, key, nn.Parameter(torch_tensor.distribute_tensor(parameter, mesh, placements)))
        if last in rows:
            module.register_forward_hook(add_up)

    def add_up(_: nn.Module, __: Any, out: Any) -> Any:
        reduced = [torch_tensor.Replicate() if p.is_partial() else p for p in out.placements]
        return out.redistribute(placements=reduced)

    return torch_tensor.distribute_module(model, mesh, place)


def train(model: nn.Module, place: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the losses of all steps."""
    data = example("data")
    text = data.standard_library_text(1 << 16)
    batches = data.batches(text, batch_size=BATCH, length=SIZES["block_size"], seed=SEED + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        tokens, targets = next(batches)
        _, loss = model(place(tokens), place(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item() if isinstance(loss, torch_tensor.DTensor) else loss.item())
    return losses


def contender(name: str, mesh: DeviceMesh) -> list[float]:
    """Initialize on the mesh, train on the mesh."""
    gpt = example("model")
    axes = mesh.mesh_dim_names or ()
    library: Any = vescale_dtensor if name == OURS else torch_tensor
    batch = [library.Shard(0) if axis == "dp" else library.Replicate() for axis in axes]
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(dropout=DROPOUT, **SIZES))
    with contextlib.ExitStack() as stack:
        if name == OURS:
            model = vescale_dtensor.parallelize_module(model, mesh, "nanogpt")
        else:
            model = torch_parallel(model, mesh)
            stack.enter_context(implicit_replication())
        if name == FIXED:
            stack.enter_context(vescale_rng.single_device())
        model.to_empty(device="cpu")
        draw_parameters(model)
        return train(model, lambda t: library.distribute_tensor(t, mesh, batch))


def one_device() -> list[float]:
    """Train the same model without a mesh."""
    gpt = example("model")
    torch.manual_seed(SEED)
    return train(gpt.GPT(gpt.GPTConfig(dropout=DROPOUT, **SIZES)), lambda t: t)


def run_rank(rank: int, folder: str, sizes: dict[str, int]) -> None:
    """Be one of 4 ranks; the first writes the losses."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        losses = {name: contender(name, mesh) for name in (OURS, FIXED, TORCH)}
        if rank == 0:
            losses["one device"] = one_device()
            (Path(folder) / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print a table per mesh."""
    options = parser(__doc__ or "").parse_args()
    report = Report(f"losses of a GPT with dropout {DROPOUT} on 4 ranks, against one device; float32, {STEPS} steps")
    for sizes in MESHES:
        with tempfile.TemporaryDirectory(prefix="rng-consistency-") as folder:
            start_processes(run_rank, args=(folder, sizes), nprocs=4, start_method="fork")
            losses: dict[str, list[float]] = json.loads((Path(folder) / "losses.json").read_text())
        single = losses.pop("one device")
        mesh = ",".join(f"{k}={v}" for k, v in sizes.items())
        report.heading(f"mesh {mesh}: largest |difference| of a loss over {TOLERANCE:g}")
        for name, curve in losses.items():
            worst = max(abs(a - b) for a, b in zip(curve, single, strict=True))
            note = f"{worst:.1e}; last loss {curve[-1]:.6f}, of one device {single[-1]:.6f}"
            report.add(row(f"{name}, {mesh}", worst / TOLERANCE, None if name == TORCH else 1.0, note))
    report.finish(options.json)


if __name__ == "__main__":
    main()
