"""Ranks that disagree, do not come, or die: all others end with an error that names them."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import PeerTransport, RankOrderTransport, SharedTransport, peer
from vescale_comm.errors import CommError, MismatchError, TransportError
from vescale_testing import RankFailure, run_ranks


@pytest.mark.ranks(3)
def test_ranks_that_ask_for_different_things_over_peers(rank):
    """Sizes that do not fit are never delivered; both sides learn what the other one was at."""
    transport = PeerTransport(dist.new_group(timeout=timedelta(seconds=1)))
    buffer = torch.ones(6000 if rank == 1 else 3000, dtype=torch.float32)
    work = transport.reduce_scatter(buffer)
    with pytest.raises(TransportError, match=rf"rank {rank}: collective 0, reduce_scatter of .*float32") as caught:
        work.wait()
    with pytest.raises(TransportError) as again:
        work.wait()
    assert again.value is caught.value
    assert torch.equal(buffer[:10], torch.ones(10))
    text = str(caught.value)
    assert "every rank must call the same" in text or "failed too, in collective 0, reduce_scatter" in text
    if rank != 1:
        assert "rank 1 failed" in text
        assert "reduce_scatter of 6000 float32" in text


@pytest.mark.ranks(3)
def test_ranks_that_ask_for_different_things_in_shared_memory(rank):
    transport = SharedTransport(dist.group.WORLD)
    with pytest.raises(CommError) as caught:
        transport.all_reduce(torch.ones(10 if rank == 2 else 12), divisor=3).wait()
    text = str(caught.value)
    if isinstance(caught.value, MismatchError):
        assert "all_reduce of 10 float32 divided by 3" in text
        assert "all_reduce of 12 float32 divided by 3" in text
        assert "rank 2" in text
    else:
        assert "gave up" in text
    with pytest.raises(CommError):
        transport.all_gather(torch.zeros(3))
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_in_time(rank):
    shared = SharedTransport(dist.group.WORLD, timeout=timedelta(seconds=0.3))
    peers = PeerTransport(dist.new_group(timeout=timedelta(seconds=0.3)))
    native = RankOrderTransport(dist.new_group(timeout=timedelta(seconds=0.3)))
    if rank == 0:
        with pytest.raises(TransportError, match="rank 0: collective 0, all_gather of 4 float32: rank 1 did not come"):
            shared.all_gather(torch.zeros(4)).wait()
        with pytest.raises(TransportError, match=r"receiving from rank 1 failed.*(\n|.)*rank 1 is stuck"):
            peers.all_gather(torch.zeros(4)).wait()
        with pytest.raises(
            TransportError, match="rank 0: collective 0, reduce_scatter of 4 float32: all_to_all_single"
        ):
            native.reduce_scatter(torch.zeros(4)).wait()
    dist.barrier()
    if rank == 1:
        with pytest.raises(TransportError, match=r"rank 0 gave up: rank 0: collective 0.*rank 1 did not come"):
            shared.all_gather(torch.zeros(4)).wait()


@pytest.mark.ranks(2)
def test_a_rank_that_is_interrupted_ends_the_other_at_once(rank, monkeypatch):
    """In the midst of a sum: it has sent its part, and never sends the result."""
    monkeypatch.setattr(peer, "SMALL", 0)
    transport = PeerTransport(dist.new_group())
    work = transport.all_reduce(torch.ones(10))
    if rank == 0:

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(peer, "add_in_order", stop)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        with pytest.raises(
            TransportError, match=r"rank 0: collective 0, all_reduce .* interrupted by KeyboardInterrupt"
        ):
            work.wait()
    else:
        told = "(?s)rank 0 failed: .*rank 0 failed too, in collective 0, all_reduce of 10 float32: KeyboardInterrupt"
        with pytest.raises(TransportError, match=told):
            work.wait()
    dist.barrier()


def sum_until_killed(rank: int, kind: str, folder: str) -> None:
    """Add until a rank is killed; the others write what they were told, and when."""
    make = {"p2p": PeerTransport, "shared": SharedTransport}[kind]
    transport = make(dist.group.WORLD)
    buffer = transport.allocate(3000, torch.float32, torch.device("cpu"))
    try:
        for step in range(20):
            work = transport.all_reduce(buffer)
            if step == 7 and rank == 1:
                (Path(folder) / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            work.wait()
    except TransportError as error:
        (Path(folder) / f"{rank}.txt").write_text(f"{time.time()} {error}")


@pytest.mark.parametrize("kind", ["p2p", "shared"])
def test_a_killed_rank_ends_the_others_at_once(tmp_path, kind):
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(sum_until_killed, 3, kwargs={"kind": kind, "folder": str(tmp_path)})
    told = {rank: (tmp_path / f"{rank}.txt").read_text() for rank in (0, 2)}
    assert any("rank 1" in text and ("gone" in text or "ended before it came" in text) for text in told.values()), told
    for rank, text in told.items():
        assert f"rank {rank}: collective" in text
        assert "rank 1" in text or "gave up" in text or "failed too" in text
        assert float(text.split()[0]) - float((tmp_path / "killed").read_text()) < 3
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "vescale" in name]
