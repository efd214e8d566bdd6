"""The transport that computes what another backend would, against the functions and against the p2p transport."""

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import PeerTransport, add_in_order
from vescale_comm.emulator import EmulatedTransport, all_reduce, emulate, orders, reduce_scatter_tensor


def terms(world, numel=12, dtype=torch.float32):
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    return [torch.randn(2, numel, generator=one).exp().prod(0).to(dtype) for one in generators]


def use(rank, make):
    """Return what the collectives of a transport leave, and check those that move only."""
    world = dist.get_world_size()
    transport = make(dist.group.WORLD)
    mine = terms(world)
    buffer = mine[rank].clone()
    transport.all_gather(buffer).wait()
    assert torch.equal(buffer, torch.cat([mine[other][other * 4 :][:4] for other in range(world)]))
    buffer = mine[rank].clone()
    transport.broadcast(buffer, 1).wait()
    assert torch.equal(buffer, mine[1])
    total, part = mine[rank].clone(), mine[rank].clone()
    works = [transport.all_reduce(total, divisor=3), transport.reduce_scatter(part, divisor=2)]
    for work in works:
        work.wait()
    half = mine[rank].to(torch.bfloat16)
    transport.all_reduce(half, accumulate=torch.float32).wait()
    return total, part.view(world, -1)[rank], half


@pytest.mark.parametrize("name", orders)
def test_sums_are_those_of_the_order(name):
    order, mine = orders[name], terms(3)
    expected = all_reduce(order, mine) / 3
    wide = all_reduce(order, [term.bfloat16().float() for term in mine]).bfloat16()
    for rank, (total, part, half) in enumerate(emulate(use, 3, args=(lambda group: EmulatedTransport(group, name),))):
        assert torch.equal(total, expected)
        assert torch.equal(part, reduce_scatter_tensor(order, mine)[rank] / 2)
        assert torch.equal(half, wide)


def test_canonical_sums_are_those_of_the_peer_transport_in_an_emulated_world():
    emulated, peer = emulate(use, 3, args=(EmulatedTransport,)), emulate(use, 3, args=(PeerTransport,))
    for one, other in zip(emulated, peer, strict=True):
        assert all(map(torch.equal, one, other))
    expected = torch.empty(12)
    add_in_order(terms(3), expected, 3)
    assert torch.equal(peer[0][0], expected)


@pytest.mark.ranks(3, timeout=120)
def test_on_real_ranks(rank, world):
    total, part, _ = use(rank, lambda group: EmulatedTransport(group, "nccl_ring"))
    assert torch.equal(total, all_reduce(orders["nccl_ring"], terms(3)) / 3)
    assert torch.equal(part, reduce_scatter_tensor(orders["nccl_ring"], terms(3))[rank] / 2)
    dtypes = torch.arange(6, dtype=torch.int16)
    transport = EmulatedTransport(dist.group.WORLD)
    transport.all_reduce(dtypes).wait()
    assert dtypes.tolist() == [0, 3, 6, 9, 12, 15]
    with pytest.raises(ValueError, match="a length that 3 ranks divide"):
        transport.reduce_scatter(torch.ones(4))
    assert transport.canonical
    assert not EmulatedTransport(dist.group.WORLD, "gloo").canonical
