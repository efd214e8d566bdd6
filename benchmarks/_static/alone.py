"""Rows on one rank of a fake group, where collectives cost their call only: what remains is the work of the library."""

from __future__ import annotations

import torch.distributed as dist
from _timing import Report, interleave
from torch.distributed.device_mesh import init_device_mesh

from .contenders import BUCKET, DYNAMIC, STATIC, WARM_UP, collectives, contenders, report_times
from .ranks import SMALL, models


def fake(report: Report, seconds: float, quick: bool) -> None:
    """Report the times of steps on one rank of dp 2 x tp 2.

    Args:
        report: takes the rows.
        seconds: about how long each model is measured.
        quick: only small models.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    report.heading("train step on a fake group, dp 2 x tp 2, over the program written by hand")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, sizes in models().items():
        if quick and name not in SMALL:
            continue
        steps = contenders(sizes, mesh)
        times = interleave(steps, seconds=seconds, warm_up=WARM_UP)
        sent = " / ".join(str(collectives(steps[n]).total()) for n in (BUCKET, STATIC, DYNAMIC))
        report_times(report, f"fake, {name}", times, f"collectives {sent}")
    dist.destroy_process_group()
