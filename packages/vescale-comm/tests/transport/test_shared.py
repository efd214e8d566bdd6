"""Shared memory: its buffers, its life and its limits. What it computes is tested with the other transports."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import SharedTransport, shared, shared_board, shared_memory, shared_places, shared_setup
from vescale_comm.errors import MismatchError, TransportError

CPU = torch.device("cpu")


def mapped() -> int:
    """Segments of this package that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("vescale_comm")


def open_files() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("vescale_comm" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.ranks(2)
def test_memory_ends_with_its_tensors(rank):
    transport = SharedTransport(dist.group.WORLD)
    idle = mapped(), open_files()
    for _ in range(3):
        buffer = transport.allocate(1_000_000, torch.float32, CPU)
        buffer.fill_(rank + 1.0)
        transport.all_reduce(buffer).wait()
        assert torch.equal(buffer, torch.full_like(buffer, 3.0))
        part = buffer[10:20]
        del buffer
        gc.collect()
        assert part.tolist() == [3.0] * 10
        del part
    last = transport.allocate(1_000_000, torch.float32, CPU)  # what the other rank freed is unmapped when this is seen
    dist.barrier()
    transport.all_reduce(last).wait()
    assert mapped() <= idle[0] + 2
    assert open_files() <= idle[1] + 1
    transport.close()
    with pytest.raises(TransportError, match="is closed"):
        transport.all_reduce(last)
    assert last[0].item() == 0.0
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_buffer_belongs_to_its_owner_again_when_its_result_is_there(rank):
    """Also while the other rank has not fetched its own: what it still reads is a copy."""
    transport = SharedTransport(dist.group.WORLD)
    buffer = torch.full((100,), rank + 1.0)

    def holders():
        return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)

    alone = holders()
    work = None
    if rank == 1:
        work = transport.all_reduce(buffer)
        assert holders() > alone
    dist.barrier()
    if rank == 0:
        work = transport.all_reduce(buffer)
        work.wait()
        assert holders() == alone
    dist.barrier()
    work.wait()
    assert holders() == alone
    assert torch.equal(buffer, torch.full((100,), 3.0))
    last = torch.ones(3)
    transport.all_reduce(last).wait()
    assert last.tolist() == [2.0] * 3
    transport.close()
    dist.barrier()


@pytest.mark.ranks(2)
def test_small_buffers_share_a_file(rank):
    transport = SharedTransport(dist.group.WORLD)
    before = open_files()
    buffers = [transport.allocate(100 + n, dtype, CPU) for n in range(50) for dtype in (torch.float32, torch.bool)]
    assert open_files() == before + 1
    assert all(not buffer.any() for buffer in buffers)
    starts = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))
    assert all(buffer.untyped_storage().data_ptr() == buffer.data_ptr() for buffer in buffers)
    buffers[7][rank] = True
    transport.all_gather(buffers[7][:2]).wait()
    assert buffers[7][:3].tolist() == [True, True, False]
    assert transport.allocate(0, torch.float32, CPU).shape == (0,)
    with pytest.raises(ValueError, match="for the CPU; got meta"):
        transport.allocate(3, torch.float32, torch.device("meta"))
    with pytest.raises(ValueError, match="for the CPU"):
        transport.all_reduce(torch.zeros(3, device="meta"))


@pytest.mark.ranks(3)
def test_some_ranks_with_private_buffers(rank, world):
    """Rank 1 gives shared memory, the others do not; a part of a buffer is as good as the whole."""
    transport = SharedTransport(dist.group.WORLD)
    for numel in (9, 30_000):
        for _ in range(2):
            make = transport.allocate if rank == 1 else lambda numel, dtype, _: torch.zeros(numel, dtype=dtype)
            whole = make(3 * numel, torch.float64, CPU)
            buffer = whole[numel : 2 * numel]
            buffer.copy_(torch.arange(numel) * (rank + 1))
            transport.all_reduce(buffer).wait()
            assert torch.equal(buffer, torch.arange(numel).double() * 6)
            buffer.copy_(torch.arange(numel) * (rank + 1))
            transport.reduce_scatter(buffer).wait()
            part = slice(rank * numel // 3, (rank + 1) * numel // 3)
            assert torch.equal(buffer[part], torch.arange(numel).double()[part] * 6)
            buffer.copy_(torch.arange(numel) + rank)
            transport.all_gather(buffer).wait()
            assert torch.equal(buffer, torch.arange(numel) + torch.arange(3).repeat_interleave(numel // 3))
            assert not whole[:numel].any()
            assert not whole[2 * numel :].any()


@pytest.mark.ranks(3)
def test_memory_in_common_is_written_once(rank):
    transport = SharedTransport(dist.group.WORLD)
    buffer = transport.allocate_common(3000, torch.float32)
    own = buffer[rank * 1000 : (rank + 1) * 1000]
    for step in range(5):
        own.fill_(10.0 * step + rank)
        transport.all_gather(buffer).wait()
        assert torch.equal(buffer, 10.0 * step + torch.arange(3.0).repeat_interleave(1000))
        transport.all_gather(torch.zeros(3)).wait()  # nobody writes before all have read
    if rank == 2:
        buffer.zero_()
    transport.broadcast(buffer, 2).wait()
    assert not buffer.any()
    half = buffer[600:1200]
    transport.all_gather(half).wait()
    with pytest.raises(ValueError, match="all ranks have in common makes no sense"):
        transport.all_reduce(buffer)
    with pytest.raises(MismatchError, match="in memory that all ranks have in common"):
        transport.all_gather(buffer if rank else torch.zeros(3000)).wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_more_collectives_than_slots(rank):
    transport = SharedTransport(dist.group.WORLD)
    buffers = [transport.allocate(20_000, torch.float32, CPU).fill_(n + rank) for n in range(shared_board.SLOTS + 20)]
    works = [transport.all_reduce(buffer) for buffer in buffers]
    for work in works[::-1] if rank else works:
        work.wait()
    for n, buffer in enumerate(buffers):
        assert torch.equal(buffer, torch.full_like(buffer, 2.0 * n + 1))
    dist.barrier()


@pytest.mark.ranks(2)
def test_without_memory_there_is_private_memory_or_an_error(rank, monkeypatch):
    transport = SharedTransport(dist.group.WORLD)

    def refuse(nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")

    if rank == 1:
        monkeypatch.setattr(shared_places, "create", refuse)
    logged = []
    monkeypatch.setattr(shared.logger, "warning", lambda text, *values: logged.append(text % values))
    buffer = transport.allocate(4, torch.float32, CPU)
    assert logged == (["rank 1: no shared memory for 4 x torch.float32: no 1048576 bytes"] if rank else [])
    buffer += 1
    text = "rank 1: all_reduce of 4 float32: no 65536 bytes" if rank else "rank 1 gave up: rank 1: all_reduce of 4"
    with pytest.raises(TransportError, match=text):
        transport.all_reduce(buffer).wait()
    dist.barrier()


@pytest.mark.ranks(3)
def test_all_ranks_refuse_where_one_cannot(rank, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("not today")

    if rank == 1:
        monkeypatch.setattr(shared_setup, "create", refuse)
    with pytest.raises(TransportError, match="rank 1: cannot make shared memory: not today"):
        SharedTransport(dist.group.WORLD)
    if rank == 1:
        monkeypatch.undo()
        monkeypatch.setattr(shared_setup, "attach", refuse)
    with pytest.raises(TransportError, match="rank 1: cannot open the memory of rank 0: not today"):
        SharedTransport(dist.group.WORLD)
    monkeypatch.undo()
    if rank == 2:
        monkeypatch.setattr(os, "getuid", lambda: 77)
    with pytest.raises(TransportError, match=r"Ranks 0 and 2 of the group are on different hosts.*user 77"):
        SharedTransport(dist.group.WORLD)
    monkeypatch.undo()
    SharedTransport(dist.group.WORLD).all_gather(torch.zeros(3)).wait()


def test_phases_after_the_counter_wrapped():
    """Collective numbers beyond 2**30 no longer fit beside their phase into 32 bits."""
    segments = [shared_memory.create(shared_board.Board.BYTES) for _ in range(2)]
    board = shared_board.Board(segments, 0, [os.getpid()] * 2, [0, 0])
    # As in a slot of 64 collectives: the number before last time, and this one.
    for before, number in ((2**30 - 59, 2**30 + 5), (2**30 + 5, 2**30 + 69), (2**32 - 59, 2**32 + 5)):
        board.mark(before, shared_board.DONE)
        assert not board.reached(0, number, shared_board.ARRIVED)
        board.mark(number, shared_board.ARRIVED)
        assert board.reached(0, before, shared_board.DONE)
        assert board.reached(0, number, shared_board.ARRIVED)
        assert not board.reached(0, number, shared_board.DONE)
        board.mark(number, shared_board.DONE)
        assert board.reached(0, number, shared_board.DONE)


def test_segments_are_found_by_process_and_file():
    segment = shared_memory.create(10_000)
    assert segment.nbytes % os.sysconf("SC_PAGESIZE") == 0
    other = shared_memory.attach(os.getpid(), segment.fd, segment.nbytes, segment.serial)
    segment.tensor()[17] = 5
    assert other.tensor()[17] == 5
    assert not shared_memory.is_gone(os.getpid(), other)
    with pytest.raises(OSError, match="not 1"):
        shared_memory.attach(os.getpid(), segment.fd, 1, 0)
    del segment
    gc.collect()
    assert shared_memory.is_gone(os.getpid(), other)
    assert other.tensor()[17] == 5
    with pytest.raises(MemoryError, match="but only"):
        shared_memory.create(1 << 60)
    assert shared_memory.started(os.getpid()) > 0
    assert shared_memory.started(2**22 + 1) == -1
