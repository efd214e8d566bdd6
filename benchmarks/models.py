"""Models of transformers and torch, unchanged, by plans of the zoo: do they equal one device, and what do they cost.

    python benchmarks/models.py --json rows.json Llama T5

`equal` trains in float64 on 4 gloo ranks: ten AdamW steps, whose losses are compared with one device's, and
whose implicit communications are counted. `time` compares a training step, dynamic and static, with
that of a local program, in one process with a fake group of 4, whose collectives cost only their call. The local
program is the plain model with this rank's shards for parameters: what a careful person would run, without the
communication. It keeps the whole sequence between blocks, which sequence parallelism cuts.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, interleave, microseconds, parser, row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, explain, parallelize_module, static
from vescale_testing.models import Double, Example, Size, examples

RANKS = 4
MESHES = ((4, 1), (2, 2), (1, 4))
TIMED_MESHES = ((4, 1), (2, 2))
AXES = ("dp", "tp")
STEPS = 10
TIMED = Size(width=64, layers=2, vocabulary=128, rows=8, length=32)
OURS, STATIC, LOCAL = "ours", "static", "local"


def title(name: str, mesh: tuple[int, int]) -> str:
    """Spell a model and a mesh."""
    return f"{name}, dp {mesh[0]} x tp {mesh[1]}"


# ------------------------------------------------------------------ equality with one device


def equality(report: Report, chosen: list[str]) -> None:
    """Train every model on every mesh and compare the losses."""
    report.heading(f"{STEPS} AdamW steps in float64: largest difference of a loss from one device's; implicit messages")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_compare, (chosen, folder), RANKS, start_method="spawn")
        rows = json.loads((Path(folder) / "rows.json").read_text())
    for name, mesh, difference, implicit, sent in rows:
        report.add(row(f"{title(name, mesh)}: loss", difference, 1e-9, f"{difference:.1e}"))
        report.add(row(f"{title(name, mesh)}: implicit", implicit, 0, f"{sent} collectives in a step"))


def _compare(rank: int, chosen: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    warnings.simplefilter("ignore")
    rows = []
    for mesh_shape in MESHES:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXES)
        for name in chosen:
            difference, implicit, sent = _difference(examples()[name], mesh)
            rows.append((name, mesh_shape, difference, implicit, sent))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _difference(example: Example, mesh: Any) -> tuple[float, int, int]:
    """Largest difference of a loss, implicit communications, and all communications of a step."""
    single = example.built().double()
    parallel = parallelize_module(copy.deepcopy(single), mesh, example.plan)
    inputs, target = (in_float64(x) for x in example.batch())
    placed = distribute_tensor(target, mesh, target_placements(example))
    models = ((single, target), (parallel, placed))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m, _ in models]
    worst, implicit, sent = 0.0, 0, 0
    for step in range(STEPS):
        losses = []
        with explain() as trace, Double():
            for (model, wanted), optimizer in zip(models, optimizers, strict=True):
                loss = example.loss(model(**inputs), wanted)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        worst = max(worst, abs(losses[0].item() - losses[1].full_tensor().item()))
        if step == 0:
            implicit, sent = len(trace.implicit), len(trace.records)
    return worst, implicit, sent


def target_placements(example: Example) -> list[Any]:
    """Where the targets of a loss lie."""
    return [Shard(example.batch_dim) if axis == "dp" or example.spread else Replicate() for axis in AXES]


def in_float64(value: Any) -> Any:
    """Floating-point tensors in float64."""
    if isinstance(value, dict):
        return {k: in_float64(v) for k, v in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# ------------------------------------------------------------------ time of a step


def times(report: Report, chosen: list[str]) -> None:
    """Time a training step of every model on every mesh, over that of the local program."""
    report.heading("training step over the local program's: this rank's shards in the plain model, no communication")
    dist.init_process_group("fake", store=_fake_store(), rank=0, world_size=RANKS)
    for mesh_shape in TIMED_MESHES:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXES)
        for name in chosen:
            example = examples()[name]
            local = _local_step(example, mesh, mesh_shape)
            if local is None:
                continue
            fixed, parts = _static_step(example, mesh)
            steps = {OURS: _our_step(example, mesh)[1], STATIC: fixed, LOCAL: local}
            spent = interleave(steps, seconds=3.0, burst_seconds=2e-3)
            note = f"local / ours / static {microseconds(*(spent.median(n) for n in (LOCAL, OURS, STATIC)))}"
            report.add(row(f"{title(name, mesh_shape)}: time", spent.ratio(OURS, LOCAL), None, note))
            report.add(row(f"{title(name, mesh_shape)}: static", spent.ratio(STATIC, LOCAL), None, parts))
    dist.destroy_process_group()


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _our_step(example: Example, mesh: Any, granularity: str | None = None) -> tuple[nn.Module, Callable[[], None]]:
    model = parallelize_module(example.built(TIMED), mesh, example.plan)
    if granularity is not None:
        static(model, granularity=granularity)
    inputs, target = example.batch(TIMED)
    return model, _step(example, model, inputs, distribute_tensor(target, mesh, target_placements(example)))


def _static_step(example: Example, mesh: Any) -> tuple[Callable[[], None], str]:
    """A step of the static model, or of one with static layers where the whole cannot be, and which it is."""
    for granularity in ("module", "layers"):
        model, step = _our_step(example, mesh, granularity)
        for _ in range(5):
            step()
        if "def program" in model.static_code():
            break
    return step, "the whole" if granularity == "module" else "its layers"


def _local_step(example: Example, mesh: Any, mesh_shape: tuple[int, int]) -> Callable[[], None] | None:
    """A step of the plain model with this rank's shards; None where its text names the number of features."""
    cut = mesh_shape[1] > 1 and not example.spread
    if cut and example.name not in _FOLLOWS_ITS_WEIGHTS:
        return None
    sharded = parallelize_module(example.built(TIMED), mesh, example.plan)
    model = example.built(TIMED)
    for ours, plain in zip(sharded.parameters(), model.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        plain.data = ours.detach().to_local().clone()
    if cut:
        _FOLLOWS_ITS_WEIGHTS[example.name](model, mesh_shape[1])
    rows = TIMED.rows // (RANKS if example.spread else mesh_shape[0])
    words = TIMED.vocabulary // (mesh_shape[1] if cut else 1)
    inputs, target = example.batch(replace(TIMED, rows=rows, vocabulary=words))
    return _step(example, model, inputs, target)


def _nothing(model: nn.Module, ranks: int) -> None:
    """Leave a model as it is whose text takes the number of heads from the size of its weights."""


def _local_heads(model: nn.Module, ranks: int) -> None:
    """Tell the attentions of T5 how many heads they have."""
    for module in model.modules():
        if hasattr(module, "n_heads"):
            module.n_heads //= ranks  # type: ignore[operator]


def _local_widths(model: nn.Module, ranks: int) -> None:
    """Tell the layers of GPT-2 how wide they are."""
    for module in model.modules():
        if hasattr(module, "split_size"):
            module.split_size //= ranks  # type: ignore[operator]
        if hasattr(module, "nf"):
            module.nf = module.weight.shape[1]  # type: ignore[union-attr]


_FOLLOWS_ITS_WEIGHTS: dict[str, Callable[[nn.Module, int], None]] = {
    **dict.fromkeys(("Llama", "Qwen3", "Gemma", "Mixtral", "BERT", "ViT"), _nothing),
    "GPT-2": _local_widths,
    "T5": _local_heads,
}
"""Models that run on shards of their weights, and what must be told to them."""


def _step(example: Example, model: nn.Module, inputs: dict[str, Any], target: Tensor) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        example.loss(model(**inputs), target).backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def main() -> None:
    """Run the parts and print the rows."""
    known = [n for n, e in examples().items() if not e.needs or importlib.util.find_spec(e.needs) is not None]
    options = parser(__doc__ or "")
    options.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(known)}; all by default")
    options.add_argument("--part", choices=("equal", "time"), action="append", help="both by default")
    given = options.parse_args()
    unknown = sorted(set(given.models) - set(known))
    if unknown:
        options.error(f"there are no models {unknown} here; there are {known}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("Models by plans of the zoo")
    for name, part in (("equal", equality), ("time", times)):
        if not given.part or name in given.part:
            part(report, given.models or known)
    report.finish(given.json)


if __name__ == "__main__":
    main()
