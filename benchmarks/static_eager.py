"""What recorded programs cost: beside a program written by hand, the dynamic path, torch's DTensor and one device.

    python benchmarks/static_eager.py --json rows.json
    python benchmarks/static_eager.py fake --seconds 4

A step is forward, loss, backward, and the dropping of gradients. First on a fake group, where collectives cost their
call only, so that what remains is the work of the library; then on gloo ranks of their own.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from _static.programs import GPT, HandGPT, Sizes, explicit, sharded, torch_sharded
from _timing import Report, Times, interleave, microseconds, parser, row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.multiprocessing.spawn import start_processes

from vescale_dtensor import DTensor, implicit_communication, static

HAND, STATIC, DYNAMIC, TORCH, ALONE = "by hand", "static", "dynamic", "torch's DTensor", "one device"
HAND_EXPLICIT = "by hand, explicit attention"
MODELS = {
    "block, d=64": Sizes(layers=1, width=64),
    "block, d=512": Sizes(layers=1, width=512),
    "2 layers, d=64": Sizes(layers=2, width=64),
    "4 layers, d=64": Sizes(layers=4, width=64),
    "12 layers, d=64": Sizes(layers=12, width=64),
    "4 layers, d=512": Sizes(layers=4, width=512),
}
ON_RANKS = {name: MODELS[name] for name in ("2 layers, d=64", "4 layers, d=512")}
GOALS = {STATIC: 1.00, DYNAMIC: 1.20}
Step = Callable[[], object]


def contenders(sizes: Sizes, mesh: DeviceMesh, *, torchs: bool) -> dict[str, Step]:
    """Make the steps of all contenders, which train the same parameters on the same batch."""
    torch.manual_seed(0)
    whole, apart = GPT(sizes), GPT(sizes, explicit)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    mine = [t.chunk(mesh.size(0))[dp].contiguous() for t in (tokens, targets)]
    placements = [Shard(0), Replicate()]
    ours = [DTensor.from_local(t, mesh, placements, run_check=False) for t in mine]
    steps = {
        HAND: step_of(HandGPT(sizes, mesh).load(whole, tp, mesh.size(1)), *mine),
        STATIC: step_of(static(sharded(whole, mesh)), *ours),
        DYNAMIC: step_of(sharded(whole, mesh), *ours),
        ALONE: step_of(whole, tokens, targets),
    }
    if torchs:
        steps[HAND_EXPLICIT] = step_of(HandGPT(sizes, mesh, explicit).load(apart, tp, mesh.size(1)), *mine)
        data = [torch_tensor.DTensor.from_local(t, mesh, placements, run_check=False) for t in mine]
        steps[TORCH] = _with_plain_tensors(step_of(torch_sharded(apart, mesh), *data))
    return steps


def _with_plain_tensors(step: Step) -> Step:
    """Let torch's DTensor take the positions, which the model makes, as the same on all ranks, as ours does."""

    def with_plain_tensors() -> object:
        with implicit_replication():
            return step()

    return with_plain_tensors


def step_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """Return a train step without its optimizer."""
    parameters = list(model.parameters())

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        for parameter in parameters:
            parameter.grad = None
        return loss

    return step


def check(steps: dict[str, Step]) -> None:
    """Refuse to time programs that do not compute the same loss."""
    for _ in range(2):
        for name in (STATIC, DYNAMIC):
            steps[name]()
    losses = {name: _number(step()) for name, step in steps.items()}
    for name, loss in losses.items():
        base = losses[HAND_EXPLICIT] if name in (TORCH, HAND_EXPLICIT) else losses[ALONE]
        if abs(loss - base) > 1e-4:
            raise RuntimeError(f"{name} computes another loss: {losses}")


def _number(loss: object) -> float:
    if isinstance(loss, torch_tensor.DTensor):
        return float(loss.full_tensor())
    assert isinstance(loss, Tensor)
    return loss.item()


def report_times(report: Report, label: str, times: Times) -> None:
    """Add the rows of one model."""
    spent = microseconds(times.median(HAND), times.median(STATIC), times.median(DYNAMIC))
    note = f"by hand / static / dynamic {spent}"
    report.add(row(f"{label}: static", times.ratio(STATIC, HAND), GOALS[STATIC], note))
    report.add(row(f"{label}: dynamic", times.ratio(DYNAMIC, HAND), GOALS[DYNAMIC]))
    report.add(row(f"{label}: one device, whole batch", times.ratio(ALONE, HAND)))
    if TORCH in times.rounds:
        ratio = times.ratio(TORCH, HAND_EXPLICIT)
        report.add(row(f"{label}: torch's DTensor", ratio, None, "over by hand, both with explicit attention"))
        ours = times.ratio(STATIC, HAND)
        report.add(row(f"{label}: torch's DTensor over static", ratio / ours, None, "of the two ratios to by hand"))


def fake(report: Report, seconds: float) -> None:
    """Time all models on one rank of a fake group of 2 x 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    report.heading("train step on a fake group, dp 2 x tp 2, over the program written by hand")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, sizes in MODELS.items():
        steps = contenders(sizes, mesh, torchs=True)
        for _ in range(3):
            for one in steps.values():
                one()
        report_times(report, name, interleave(steps, seconds=seconds, warm_up=3))
    dist.destroy_process_group()


def ranks(report: Report, seconds: float) -> None:
    """Time two models on 2 and 4 gloo ranks."""
    for world, shape in ((2, (1, 2)), (4, (2, 2))):
        report.heading(f"train step on {world} gloo ranks, dp {shape[0]} x tp {shape[1]}, over the program by hand")
        with tempfile.TemporaryDirectory(prefix="static-eager-") as folder:
            start_processes(_rank, (world, shape, folder, seconds), world, start_method="spawn")
            measured = json.loads((Path(folder) / "times.json").read_text())
        for name, rounds in measured.items():
            report_times(report, f"{name}, {world} ranks", Times(rounds))


def _rank(rank: int, world: int, shape: tuple[int, int], folder: str, seconds: float) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    measured = {}
    with implicit_communication("error"):
        for name, sizes in ON_RANKS.items():
            steps = contenders(sizes, mesh, torchs=True)
            check(steps)
            measured[name] = _together(steps, seconds)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _together(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Time in turns, each step begun together by all ranks; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end, going = time.monotonic() + seconds, torch.ones(1)
    while going.item():
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            times[name].append(spent.item())
        going[0] = float(time.monotonic() < end)
        dist.broadcast(going, 0)
    return times


def main() -> None:
    """Run both parts, or the one that is named."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("parts", nargs="*", metavar="PART", help="fake or ranks; both by default")
    arguments.add_argument("--seconds", type=float, default=8.0, help="per model, 8 by default")
    args = arguments.parse_args()
    parts = {"ranks": ranks, "fake": fake}
    unknown = set(args.parts) - set(parts)
    if unknown:
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    report = Report(f"static eager, torch {torch.__version__}, one thread")
    for name, part in parts.items():
        if not args.parts or name in args.parts:
            part(report, args.seconds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
