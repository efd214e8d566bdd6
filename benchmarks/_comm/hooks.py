"""Rows without ranks: what data parallelism costs per parameter and step apart from communication."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _timing import Report, row
from torch import Tensor, nn

from vescale_comm._replicate import replicate
from vescale_comm._transport import FakeTransport

COUNT, ROUNDS = 200, 200


class Many(nn.Module):
    """Small parameters, so that hooks cost more than arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(COUNT)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * part
        return x


def hooks(report: Report) -> None:
    """Report CPU microseconds per parameter of a step that are not in a step without data parallelism."""
    report.heading(f"hooks: CPU microseconds per parameter and step, {COUNT} parameters, no ratio")
    x = torch.ones(16)

    def step_of(model: nn.Module, accumulate: bool = False) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=not accumulate)
            model(x).sum().backward()

        return step

    with tempfile.TemporaryDirectory(prefix="bench-comm-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        steps = {
            "nothing": step_of(Many()),
            "ours": step_of(replicate(Many(), transport=FakeTransport(1))),
            "ours, gradients zeroed in place": step_of(replicate(Many(), transport=FakeTransport(1)), True),
            "ours, autograd adds in the buffers": step_of(replicate(Many(), transport=FakeTransport(1), view=True)),
            "nothing, gradients zeroed in place": step_of(Many(), True),
            "torch's wrapper": step_of(nn.parallel.DistributedDataParallel(Many())),
        }
        spent = _tenths(steps)
        dist.destroy_process_group()
    for name in steps:
        if not name.startswith("nothing"):
            base = "nothing, gradients zeroed in place" if "zeroed" in name else "nothing"
            extra = (spent[name] - spent[base]) / COUNT * 1e6
            report.add(row(f"hooks: {name}", extra, 10.0 if name.startswith("ours") else None))


def _tenths(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the 10th percentile of the CPU-seconds of each step, in turns: waiting for a core is no cost of hooks."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begun = time.thread_time()
            step()
            times[name].append(time.thread_time() - begun)
    return {name: sorted(found)[ROUNDS // 10] for name, found in times.items()}
