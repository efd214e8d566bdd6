"""Every transport: sums in rank order, bit for bit, of any dtype and length; gathers and broadcasts of any bits."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import NativeTransport, PeerTransport, RankOrderTransport, SharedTransport, peer, shared


def rank_order(group):
    return RankOrderTransport(group, dist.new_group())


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
KINDS = {"p2p": PeerTransport, "native": rank_order, "shared": SharedTransport, "direct": SharedTransport}


@functools.cache
def values(rank, numel, dtype, seed=0):
    """Numbers of one rank, which all others can work out."""
    draws = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank), dtype=torch.float64)
    return (draws * 3).to(dtype)


@functools.cache
def in_rank_order(world, numel, dtype, divisor=1, accumulate=None, seed=0):
    """Add in float64 and round to the dtype of the sum after each step: what that dtype must give."""
    total_dtype = accumulate or dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = values(0, numel, dtype, seed).to(total_dtype).to(wide)
    for rank in range(1, world):
        total = (total + values(rank, numel, dtype, seed).to(total_dtype).to(wide)).to(total_dtype).to(wide)
    # Numbers of Python take part as float32, in float64 sums as they are.
    divisor = divisor if total_dtype == torch.float64 else torch.tensor(divisor, dtype=torch.float32).double()
    return (total / divisor).to(total_dtype).to(dtype)


def buffer_of(transport, kind, content):
    """A buffer with some content, from the transport itself for kind "direct"."""
    if kind != "direct":
        return content.clone()
    buffer = transport.allocate(content.numel(), content.dtype, content.device)
    return buffer.copy_(content)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def check_all(transport, kind, rank, world, numel, dtype, divisor, accumulate):
    mine = values(rank, numel, dtype)
    expected = in_rank_order(world, numel, dtype, divisor, accumulate)
    buffer = buffer_of(transport, kind, mine)
    transport.all_reduce(buffer, divisor=divisor, accumulate=accumulate).wait()
    assert torch.equal(bits(buffer), bits(expected)), (kind, dtype, numel)
    even = numel // world * world
    if even:
        buffer = buffer_of(transport, kind, mine[:even])
        transport.reduce_scatter(buffer, divisor=divisor, accumulate=accumulate).wait()
        part = slice(rank * even // world, (rank + 1) * even // world)
        assert torch.equal(bits(buffer[part]), bits(expected[:even][part])), (kind, dtype, numel)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3, 4)])
def test_sums_are_those_in_rank_order(rank, world, world_size):
    for kind, make in KINDS.items():
        transport = make(dist.group.WORLD)
        assert (transport.rank, transport.size, transport.canonical) == (rank, world, True)
        for dtype in FLOATS:
            for numel in (0, 1, 7, 12_000, 50_003):
                check_all(transport, kind, rank, world, numel, dtype, 1, None)
            check_all(transport, kind, rank, world, 30_003, dtype, world, None)
            check_all(transport, kind, rank, world, 30_003, dtype, 0.3, torch.float32 if dtype.itemsize < 4 else None)
        for dtype in (torch.int16, torch.complex64):
            check_all(transport, kind, rank, world, 20_001, dtype, 1, None)
        check_all(transport, kind, rank, world, 30_001, torch.float8_e4m3fn, 2, torch.float32)
        transport.close()
    dist.barrier()


@pytest.mark.ranks(3)
def test_gathers_and_broadcasts_keep_all_bits(rank, world):
    for kind, make in {**KINDS, "own order": NativeTransport}.items():
        transport = make(dist.group.WORLD)
        for dtype in (*FLOATS, *OTHERS):
            for numel in (0, 3, 30_000):
                parts = [values(q, numel // world, dtype) for q in range(world)]
                content = torch.zeros(numel, dtype=dtype)
                content[rank * (numel // world) : (rank + 1) * (numel // world)] = parts[rank]
                buffer = buffer_of(transport, kind, content)
                transport.all_gather(buffer).wait()
                assert torch.equal(bits(buffer), bits(torch.cat(parts))), (kind, dtype)
                source = numel % 2 + 1
                buffer = buffer_of(transport, kind, values(rank, numel, dtype))
                transport.broadcast(buffer.view(3, -1) if numel else buffer, source).wait()
                assert torch.equal(bits(buffer), bits(values(source, numel, dtype))), (kind, dtype)
        scalar = torch.tensor(float(rank))
        transport.broadcast(scalar, 1).wait()
        assert scalar.item() == 1.0
        with pytest.raises(ValueError, match="contiguous"):
            transport.broadcast(torch.zeros(4, 4).t(), 0)
        with pytest.raises(ValueError, match="0 <= source < 3; got 3"):
            transport.broadcast(scalar, 3)
        with pytest.raises(ValueError, match="one dimension and contiguous"):
            transport.all_reduce(torch.zeros(8)[::2])
        with pytest.raises(ValueError, match="multiple of the number of ranks"):
            transport.all_gather(torch.zeros(4))
        with pytest.raises(ValueError, match="cannot be divided"):
            transport.reduce_scatter(torch.zeros(6, dtype=torch.int32), divisor=2)
    dist.barrier()


@pytest.mark.ranks(3)
def test_many_under_way_and_waited_for_in_any_order(rank, world, monkeypatch):
    numels = [5, 40_002, 9_000, 3, 30_000, 12] * 3
    for kind, make in {"threads": PeerTransport, **KINDS, "own order": NativeTransport}.items():
        monkeypatch.setattr(peer, "BESIDE", 4 if kind == "threads" else 1 << 30)  # bytes: most of them, but not all
        transport = make(dist.group.WORLD)
        contents = [values(rank, numel, torch.float64, seed) for seed, numel in enumerate(numels)]
        buffers = [buffer_of(transport, kind, content) for content in contents]
        calls = [transport.reduce_scatter if index % 3 == 1 else transport.all_reduce for index in range(len(numels))]
        works = [call(buffer) for call, buffer in zip(calls, buffers, strict=True)]
        # Each rank waits in its own order; for some twice, for some on another thread.
        order = torch.randperm(len(works), generator=torch.Generator().manual_seed(rank)).tolist()
        threads = [threading.Thread(target=works[index].wait) for index in order[:3]]
        for thread in threads:
            thread.start()
        for index in [*order, order[0]]:
            works[index].wait()
        for thread in threads:
            thread.join()
        for index, (numel, buffer) in enumerate(zip(numels, buffers, strict=True)):
            expected = in_rank_order(world, numel, torch.float64, seed=index)
            part = slice(rank * numel // world, (rank + 1) * numel // world) if index % 3 == 1 else slice(None)
            torch.testing.assert_close(buffer[part], expected[part], rtol=1e-12, atol=1e-12)
            assert kind == "own order" or torch.equal(buffer[part], expected[part])
    dist.barrier()


@pytest.mark.ranks(1)
def test_one_rank_alone():
    for kind, make in {**KINDS, "own order": NativeTransport}.items():
        transport = make(dist.group.WORLD)
        for call in (transport.all_reduce, transport.reduce_scatter):
            for numel in (5, 20_000):
                buffer = buffer_of(transport, kind, torch.full((numel,), 3.0).bfloat16())
                call(buffer, divisor=2, accumulate=torch.float32).wait()
                assert torch.equal(buffer, torch.full((numel,), 1.5).bfloat16())
        buffer = torch.ones(4)
        transport.all_gather(buffer).wait()
        transport.broadcast(buffer, 0).wait()
        assert buffer.tolist() == [1, 1, 1, 1]


@pytest.mark.ranks(4)
def test_windows_blocks_and_rounds_change_no_bit(rank, world, monkeypatch):
    """The same sums in small windows, in one round or two, staged or not, by threads or without."""
    for room, small, small_shared, beside in ((1 << 12, 0, 0, 0), (1 << 12, 0, 0, 1 << 30), (1 << 30, *[1 << 30] * 3)):
        monkeypatch.setattr(peer, "BESIDE", beside)
        monkeypatch.setattr(peer, "ROOM", room)
        monkeypatch.setattr(peer, "SMALL", small)
        monkeypatch.setattr(shared, "SMALL", small_shared)
        for kind in ("p2p",) if beside == 0 else ("p2p", "shared", "direct"):
            transport = KINDS[kind](dist.group.WORLD)
            for numel in (1, 5, 10_001):
                check_all(transport, kind, rank, world, numel, torch.float16, 3, None)
            buffer = buffer_of(transport, kind, values(rank, 11, torch.float32))
            transport.broadcast(buffer, 2).wait()
            assert torch.equal(buffer, values(2, 11, torch.float32))
    dist.barrier()


@pytest.mark.ranks(3)
def test_own_order_divides_and_accumulates(rank, world):
    transport = NativeTransport(dist.group.WORLD)
    assert not transport.canonical
    for dtype, accumulate, tolerance in (
        (torch.float64, None, 1e-12),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float32, torch.float64, 1e-6),
    ):
        expected = in_rank_order(world, 30, dtype, 3, accumulate)
        buffer = values(rank, 30, dtype)
        transport.all_reduce(buffer, divisor=3, accumulate=accumulate).wait()
        torch.testing.assert_close(buffer, expected, rtol=tolerance, atol=tolerance)
        buffer = values(rank, 30, dtype)
        transport.reduce_scatter(buffer, divisor=3, accumulate=accumulate).wait()
        part = slice(rank * 10, rank * 10 + 10)
        torch.testing.assert_close(buffer[part], expected[part], rtol=tolerance, atol=tolerance)
    dist.barrier()
