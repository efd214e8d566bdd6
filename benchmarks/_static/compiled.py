"""Rows on one rank of a fake group: recorded programs in torch.compile, beside the same programs run by Python."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _timing import Report, interleave, microseconds, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, static
from vescale_dtensor.errors import DTensorError

from .contenders import ALONE, BUCKET, STATIC, WARM_UP, Contender, contenders
from .programs import Model, sharded
from .ranks import models

CHOSEN = ("block, d=64", "2 layers, d=64", "4 layers, d=512")
COMPILED, ALONE_COMPILED = "static, compiled", "one device, compiled"
TOLERANCE = 1e-4
"""Relative difference of a loss from that of the program that is not compiled."""


def compiled(report: Report, seconds: float, quick: bool) -> None:
    """Report the times of steps, and what the compiler saves one device.

    Args:
        report: takes the rows.
        seconds: about how long each model is measured.
        quick: only the smallest model.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    report.heading("train step of compiled programs on a fake group, dp 2 x tp 2, over the program that Python runs")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in CHOSEN[:1] if quick else CHOSEN:
        steps = contenders(models()[name], mesh, (BUCKET, STATIC, ALONE))
        whole, x, targets = steps[ALONE].whole, steps[STATIC].x, steps[STATIC].targets
        assert isinstance(whole, Model)
        steps[COMPILED] = Contender(static(sharded(whole, mesh), compile=True), x, targets, whole)
        alone: nn.Module = torch.compile(whole)  # type: ignore[assignment]
        steps[ALONE_COMPILED] = Contender(alone, *whole.sizes.data(), whole)
        try:
            for step in steps.values():
                for _ in range(WARM_UP):
                    step()
        except DTensorError as error:  # no compiler
            report.add(row(f"compile, {name}", None, None, str(error)))
            break
        apart = abs(_loss(steps[COMPILED]) / _loss(steps[STATIC]) - 1)
        times = interleave(steps, seconds=seconds)
        note = f"static / compiled {microseconds(times.median(STATIC), times.median(COMPILED))}"
        report.add(row(f"compile, {name}: over static", times.ratio(COMPILED, STATIC), None, note))
        report.add(row(f"compile, {name}: over by hand", times.ratio(COMPILED, BUCKET)))
        report.add(row(f"compile, {name}: one device, over eager", times.ratio(ALONE_COMPILED, ALONE)))
        report.add(row(f"compile, {name}: losses apart", apart, TOLERANCE))
    dist.destroy_process_group()


def _loss(step: Contender) -> float:
    """This rank's part of the loss."""
    loss = step.backward().detach()
    return (loss.to_local() if isinstance(loss, DTensor) else loss).item()
