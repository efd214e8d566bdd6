"""A rank that is killed in the middle of a step: the others end at once, with an error that names it.

The harness gives ranks three seconds once one has died, and stops those that still run.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe import PipeEngine, PipeError, PipePlan, manual
from vescale_testing import RankFailure, run_ranks

RANKS = 3


def steps(rank: int, victim: int, point: str, schedule: str, folder: str) -> None:
    """Train until the victim dies; the others write what they were told."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(RANKS)]
    calls = []

    def die(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 7:  # four micro-batches: in the second step
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        if point == "forward":
            stages[rank].register_forward_pre_hook(die)
        else:
            stages[rank][0].weight.register_hook(die)
    plan = PipePlan(schedule=schedule, num_microbatches=4, timeout=500)  # longer than the test may take
    engine = PipeEngine(manual(stages), dist.group.WORLD, plan, functional.mse_loss)
    x: Tensor = torch.randn(8, 4)
    try:
        for _ in range(4):
            engine(x, target=x)
    except PipeError as error:
        (Path(folder) / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize(("victim", "schedule"), [(0, "1f1b"), (1, "zb_h1"), (2, "gpipe")])
def test_the_others_name_a_rank_that_was_killed(tmp_path: Path, victim: int, schedule: str, point: str) -> None:
    kwargs = {"victim": victim, "point": point, "schedule": schedule, "folder": str(tmp_path)}
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(steps, RANKS, kwargs=kwargs)
    for rank in set(range(RANKS)) - {victim}:
        text = (tmp_path / f"{rank}.txt").read_text()
        assert f"rank {victim} is gone: it was killed" in text, text
