"""Which transport a group gets, and that all ranks get the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import (
    FakeTransport,
    NativeTransport,
    PeerTransport,
    RankOrderTransport,
    SharedTransport,
    choose,
    transport,
)
from vescale_comm.emulator import EmulatedTransport, emulate
from vescale_comm.errors import MismatchError, TransportError
from vescale_testing import fake_ranks


@pytest.mark.ranks(2)
def test_kinds_and_orders(rank):
    for kind, order, expected in (
        ("auto", None, SharedTransport),
        ("auto", "canonical", SharedTransport),
        ("auto", "native", NativeTransport),
        ("p2p", None, PeerTransport),
        ("shared", None, SharedTransport),
        ("native", None, RankOrderTransport),
        ("native", "canonical", RankOrderTransport),
        ("native", "native", NativeTransport),
        ("emulated", None, EmulatedTransport),
        ("emulated", "native", EmulatedTransport),
        ("fake", None, FakeTransport),
    ):
        made = transport(dist.group.WORLD, kind, order=order)
        assert type(made) is expected
        assert made.canonical == (order != "native")
        assert transport(None, made) is made
    for arguments, text in (
        ({"kind": "tcp"}, "needs one of auto, native"),
        ({"order": "ring"}, "needs one of canonical, native or None; got 'ring'"),
        ({"kind": "p2p", "order": "native"}, "adds in rank order"),
        ({"device": "meta"}, "the group has no backend for 'meta'"),
    ):
        with pytest.raises(ValueError, match=text):
            transport(dist.group.WORLD, **arguments)
    wishes = "transport 'p2p', order None.*rank 1 for transport 'shared'" if rank == 0 else "rank 0 for transport 'p2p'"
    with pytest.raises(MismatchError, match=wishes):
        transport(dist.group.WORLD, "shared" if rank else "p2p")


@pytest.mark.ranks(3)
def test_without_shared_memory_the_faster_one_is_measured_once(rank, monkeypatch):
    def refuse(group):
        raise TransportError("different hosts")

    monkeypatch.setattr(choose, "SharedTransport", refuse)
    real = choose.measure
    asked = []

    def measured(candidate, device):
        asked.append(candidate.name)
        costs = real(candidate, device, seconds=0.02)
        assert all(cost.seconds(1 << 20) > 0 for cost in costs.values())
        return costs

    monkeypatch.setattr(choose, "measure", measured)
    group = dist.new_group()
    made = [type(transport(group)) for _ in range(3)]
    assert asked == ["p2p", "native"]
    assert made[0] in (PeerTransport, RankOrderTransport)
    assert len(set(made)) == 1
    names: list[object] = [None] * 3
    dist.all_gather_object(names, made[0].__name__)
    assert len(set(names)) == 1
    buffer = torch.ones(5)
    transport(group).all_reduce(buffer).wait()
    assert buffer.tolist() == [3.0] * 5


def sum_in_emulation(rank):
    """What each kind gives in an emulated world."""
    found = []
    for kind in ("auto", "shared", "p2p", "native", "emulated"):
        buffer = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)][rank : rank + 1])
        made = transport(dist.group.WORLD, kind)
        made.all_reduce(buffer).wait()
        found.append((type(made), buffer.item()))
    buffer = torch.arange(4.0) * (rank + 1)
    transport(dist.group.WORLD, order="native").all_reduce(buffer).wait()
    return found, buffer.tolist()


def test_in_an_emulated_world_sums_are_in_rank_order_too():
    for found, own in emulate(sum_in_emulation, 4):
        assert [made for made, _ in found] == [*(3 * [PeerTransport]), RankOrderTransport, EmulatedTransport]
        assert [total for _, total in found] == [0.0] * 5
        assert own == [0.0, 10.0, 20.0, 30.0]


def test_fake_groups_get_the_transport_that_counts():
    with fake_ranks(1000, rank=77):
        made = transport()
        assert isinstance(made, FakeTransport)
        assert (made.rank, made.size) == (77, 1000)
    with pytest.raises(ValueError, match="not initialised"):
        transport()
