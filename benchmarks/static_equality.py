"""Static models against the dynamic path, bit for bit, and against one device: models of the wild by plans of the zoo.

    python benchmarks/static_equality.py --json rows.json Llama T5

Every model is trained in float64 by AdamW on 4 gloo ranks, three times: on one device, on the dynamic path, and
`static`. Losses, gradients, parameters and buffers of the last two must have the same bits after every step. Models
that stay dynamic as a whole say why, and are trained again with each of their layers static.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _timing import Report, parser, row
from models import in_float64, target_placements
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from vescale_dtensor import DTensor, distribute_tensor, parallelize_module, static
from vescale_dtensor.errors import StaticWarning
from vescale_testing.models import Double, Example, Size, examples

RANKS, STEPS = 4, 20
MESHES = ((2, 2), (4, 1))
AXES = ("dp", "tp")
NANOGPT = "nanoGPT"
WHOLE, LAYERS = "whole", "each layer"


def in_double_steps(module: nn.Module) -> nn.Module:
    """Make every step of a module one in float64, also where its text says float32; the mode is part of its forward."""
    forward = module.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        with Double():
            return forward(*args, **kwargs)

    module.forward = doubled
    return module


def nanogpt() -> Example:
    """The example of this repository, with its own plan."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "nanogpt"))
    from model import GPT, GPTConfig

    def make(size: Size) -> nn.Module:
        return GPT(  # type: ignore[no-any-return]
            GPTConfig(vocab_size=size.vocabulary, block_size=size.length, n_layer=size.layers, n_head=4, n_embd=16)
        )

    def tokens(size: Size) -> Tensor:
        return torch.randint(size.vocabulary, (size.rows, size.length))

    def loss(result: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(result[0].flatten(0, 1), target.flatten())

    return Example(NANOGPT, "nanogpt", make, lambda size: {"idx": tokens(size)}, tokens, loss)


def known() -> dict[str, Example]:
    """All models that can be made here."""
    found = {n: e for n, e in examples().items() if not e.needs or importlib.util.find_spec(e.needs) is not None}
    return {**found, NANOGPT: nanogpt()}


def regions_of(model: nn.Module, parts: str) -> list[nn.Module]:
    """The modules that become static: the whole, or the members of its outermost lists."""
    if parts == WHOLE:
        return [model]
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inner = {m for one in lists for m in one.modules() if m is not one}
    return [layer for one in lists if one not in inner for layer in one]


def prepared(model: nn.Module, parts: str) -> list[nn.Module]:
    """Compute in float64 within the modules that become static, and all around them; returns those modules."""
    regions = regions_of(model, parts)
    inside = {m for region in regions for m in region.modules()}
    around = {m for m in model.modules() if inside & set(m.modules())} - inside
    for module in [*regions, *(m for m in model.modules() if m not in inside | around)]:
        in_double_steps(module)
    return regions


def _compare(rank: int, chosen: list[str], steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    rows = []
    for mesh_shape in MESHES:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXES)
        for name in chosen:
            for parts in (WHOLE, LAYERS):
                found = _trained(known()[name], mesh, steps, parts)
                everywhere: list[Any] = [None] * RANKS
                dist.all_gather_object(everywhere, found[:2])
                same = sum(one[0] for one in everywhere)
                rows.append((name, mesh_shape, parts, same, max(one[1] for one in everywhere), *found[2:]))
                if found[2]:  # programs
                    break
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _trained(example: Example, mesh: Any, steps: int, parts: str) -> tuple[int, float, int, str]:
    """Steps with other bits than the dynamic path, largest difference to one device, programs, and why not."""
    single = example.built().double()
    one, two = (parallelize_module(copy.deepcopy(single), mesh, example.plan) for _ in range(2))
    models = [single, one, two]
    regions = [static(m) for m in [prepared(m, parts) for m in models][2]]
    inputs, target = (in_float64(x) for x in example.batch())
    placed = distribute_tensor(target, mesh, target_placements(example))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    different, worst = 0, 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            losses = []
            for model, optimizer, wanted in zip(models, optimizers, (target, placed, placed), strict=True):
                optimizer.zero_grad()
                torch.manual_seed(step)  # for dropout
                result = model(**inputs)
                with Double():
                    losses.append(example.loss(result, wanted))
                losses[-1].backward()
            same = _bits(losses[1:], [m.parameters() for m in models[1:]], gradients=True)
            for optimizer in optimizers:
                optimizer.step()
            same &= _bits(losses[1:], [[*m.parameters(), *m.buffers()] for m in models[1:]], gradients=False)
            different += not same
            whole = losses[2].full_tensor() if isinstance(losses[2], DTensor) else losses[2]
            worst = max(worst, abs(losses[0].item() - whole.item()))
    reasons = [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]
    programs = sum(region.static_code().count("def program") for region in regions)
    return different, worst, programs, reasons[0] if reasons else ""


def _bits(losses: list[Tensor], tensors: list[Any], *, gradients: bool) -> bool:
    pairs = [tuple(losses), *zip(*tensors, strict=True)]
    if gradients:
        pairs += [(a.grad, b.grad) for a, b in pairs[1:]]
    return all((a is None) == (b is None) and (a is None or torch.equal(_local(a), _local(b))) for a, b in pairs)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Train the models and print the rows."""
    options = parser(__doc__ or "")
    options.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(known())}; all by default")
    options.add_argument("--steps", type=int, default=STEPS)
    given = options.parse_args()
    unknown = sorted(set(given.models) - set(known()))
    if unknown:
        options.error(f"there are no models {unknown} here; there are {sorted(known())}")
    report = Report("Static models: steps with other bits than the dynamic path, and losses beside one device's")
    report.heading(f"{given.steps} AdamW steps in float64 on {RANKS} ranks")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_compare, (given.models or list(known()), given.steps, folder), RANKS, start_method="spawn")
        rows = json.loads((Path(folder) / "rows.json").read_text())
    for name, mesh, parts, different, worst, programs, reason in rows:
        title = f"{name}, dp {mesh[0]} x tp {mesh[1]}, {parts}"
        how = f"{programs} programs" if programs else "dynamic"
        report.add(row(f"{title}: other bits", different, 0, f"{how}{': ' if reason else ''}{reason}"))
        report.add(row(f"{title}: loss", worst, 1e-9, f"{worst:.1e}"))
    report.finish(given.json)


if __name__ == "__main__":
    main()
