"""What sharded random numbers cost beside one device that draws the whole tensor, and beside torch's own DTensor.

    python benchmarks/rng.py --json rows.json

No ranks are started: what one rank of a mesh does needs no communication, so each is timed here on its own.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from _timing import Report, interleave, microseconds, parser, row
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale_dtensor
import vescale_rng
from vescale_rng import part_of_mesh

SIDE = 8192
WORLD = 8
LAYOUTS: tuple[tuple[str, tuple[int, ...], tuple[Any, ...], float], ...] = (
    ("Shard(0)", (8,), (Shard(0),), 0.15),
    ("Shard(1)", (8,), (Shard(1),), 0.56),
    ("2 x 4, (Shard(0), Shard(1))", (2, 4), (Shard(0), Shard(1)), 0.35),
    ("4 x 2, (Replicate, Shard(0))", (4, 2), (Replicate(), Shard(0)), 0.60),
)
"""Name, mesh, placements, and the ratio of the prototype to beat (for the last: half of the numbers, and some)."""


# ------------------------------------------------------------------ large tensors


def large(report: Report) -> None:
    """Draw a float32 matrix of 8192 x 8192 on 8 ranks: first, middle and last rank against the whole."""
    report.heading(f"one rank of {WORLD}, {SIDE} x {SIDE} float32, over one device that draws the whole")
    shape = (SIDE, SIDE)
    source = torch.ones(shape)
    whole: dict[str, Callable[[], Any]] = {
        "rand": lambda: torch.rand(shape),
        "randn": lambda: torch.randn(shape),
        "dropout": lambda: F.dropout(source, 0.1),
    }
    for op, draw_whole in whole.items():
        for name, sizes, placements, goal in LAYOUTS:
            ranks = {
                at: part_of_mesh(shape, sizes, placements, coordinate=at)
                for at in ([0] * len(sizes), [s // 2 for s in sizes], [s - 1 for s in sizes])
                for at in [tuple(at)]
            }
            parts = {f"rank at {at}": partial(_draw_part, op, shape, part, source) for at, part in ranks.items()}
            times = interleave({"whole": draw_whole, **parts}, seconds=3.0, warm_up=1)
            slowest = max(parts, key=lambda rank: times.ratio(rank, "whole"))
            spent = " / ".join(f"{times.median(n) * 1e3:.0f}" for n in ("whole", *parts))
            report.add(
                row(f"{op}, {name}", times.ratio(slowest, "whole"), goal, f"slowest rank; whole / ranks {spent} ms")
            )


def _draw_part(op: str, shape: tuple[int, int], part: vescale_rng.Part, source: torch.Tensor) -> torch.Tensor:
    if op == "dropout":
        local = source[tuple(slice(0, s) for s in part.local_shape)]
        return vescale_rng.dropout(local, shape, 0.1, part=part)
    return vescale_rng.draw(op, shape, part=part)


def far(report: Report) -> None:
    """Reach the last rows of a tensor of 10^9 elements, by jumps whose polynomials are not known yet, and again."""
    report.heading("the last 1000 of 10^9 elements (Shard(0)), and the end of the draw; milliseconds, not a ratio")
    cold = []
    for count in range(1_000_000_000, 1_000_000_000 + 7 * 5_000_000, 5_000_000):
        part = part_of_mesh((count // 1000, 1000), (count // 1000,), [Shard(0)], coordinate=(count // 1000 - 1,))
        start = time.perf_counter()
        vescale_rng.rand((count // 1000, 1000), part=part)
        cold.append((time.perf_counter() - start) * 1e3)
    warm = interleave({"again": lambda: vescale_rng.rand((count // 1000, 1000), part=part)}, seconds=0.5)
    report.add(row("10^9 elements, cold (ms, median of 7)", statistics.median(cold), 60.0))
    report.add(row("10^9 elements, warm (ms)", warm.median("again") * 1e3))


# ------------------------------------------------------------------ small tensors: the cost of a call


def calls(report: Report, mesh: DeviceMesh) -> None:
    """Time one call on a 64 x 64 tensor with two shards, over what producing and passing over the numbers takes."""
    report.heading("one call at 64 x 64 of 2 shards, over torch's DTensor (which draws the wrong numbers)")
    for name, placement in (("Shard(0)", Shard(0)), ("Shard(1)", Shard(1))):
        for op in ("uniform_", "normal_", "dropout"):
            _call(report, mesh, name, placement, op)


def _call(report: Report, mesh: DeviceMesh, name: str, placement: Shard, op: str) -> None:
    theirs = torch_tensor.distribute_tensor(torch.ones(64, 64), mesh, [placement], src_data_rank=None)
    ours = vescale_dtensor.distribute_tensor(torch.ones(64, 64), mesh, [placement])
    local, rest = torch.ones_like(theirs.to_local()), torch.ones(64 * 64 - theirs.to_local().numel())

    def run(x: Any) -> Any:
        return F.dropout(x, 0.1) if op == "dropout" else getattr(x, op)()

    def numbers() -> None:
        """Produce the local numbers and pass over the others, as plainly as torch can."""
        run(local)
        (rest.bernoulli_(0.9) if op == "dropout" else rest.uniform_())

    def installed() -> Any:
        return run(theirs)

    with torch.no_grad():
        alone = interleave(
            {"numbers": numbers, "torch": partial(run, theirs), "vescale": partial(run, ours)}, seconds=1.0
        )
        with vescale_rng.single_device():
            with_rng = interleave({"numbers": numbers, "installed": installed}, seconds=1.0)
    ratio = with_rng.ratio("installed", "numbers") / alone.ratio("torch", "numbers")
    spent = microseconds(
        alone.median("numbers"), alone.median("torch"), with_rng.median("installed"), alone.median("vescale")
    )
    report.add(row(f"{op}, {name}: installed", ratio, None, f"numbers / torch's / installed / vescale_dtensor {spent}"))
    if op == "dropout":  # of four operators of torch's DTensor only one draws
        extra = (with_rng.median("installed") - alone.median("torch")) * 1e6
        report.add(row(f"{op}, {name}: installed, us over torch's DTensor", extra, 15.0))
    else:
        extra = with_rng.extra("installed", "numbers") * 1e6
        report.add(row(f"{op}, {name}: installed, us over the numbers", extra, 15.0))
    extra = alone.extra("vescale", "numbers") * 1e6
    report.add(row(f"{op}, {name}: vescale_dtensor, us over the numbers", extra, 15.0))


def main() -> None:
    """Run all parts."""
    args = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    report = Report("random numbers on shards")
    large(report)
    far(report)
    dist.init_process_group("fake", rank=0, world_size=2)
    calls(report, init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()
    report.finish(args.json)


if __name__ == "__main__":
    main()
