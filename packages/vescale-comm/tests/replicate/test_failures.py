"""Ranks that stop taking part: the others end with an error that says who and where, within the group's time-out."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_comm._replicate import DistributedDataParallel
from vescale_comm.errors import TransportError
from vescale_testing import RankFailure, run_ranks


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("transport", ["p2p", "shared"])
def test_a_rank_that_skips_a_backward_is_named(rank: int, transport: str) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1), group, transport=transport)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(TransportError, match=r"(?s)gradients of (bias|weight).*were reduced.*rank 1"):
            model(x).sum().backward()
        assert time.monotonic() - begun < 20
    dist.barrier()


def until_killed(rank: int, transport: str, path: str) -> None:
    """Train until a rank is killed; the other writes what it was told."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1), group, transport=transport)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(x).sum().backward()
    except TransportError as error:
        Path(path).write_text(str(error))


@pytest.mark.parametrize("transport", ["p2p", "shared"])
def test_a_rank_that_dies_is_named(tmp_path: Path, transport: str) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(until_killed, 2, kwargs={"transport": transport, "path": str(told)})
    assert re.search(r"(?s)gradients of (bias|weight).*were reduced.*rank 1", told.read_text())
