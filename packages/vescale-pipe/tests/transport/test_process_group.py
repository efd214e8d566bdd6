"""Messages over gloo: any layout at any time, and failures of the other rank."""

import os

import pytest
import torch
import torch.distributed as dist

from vescale_pipe._transport import GroupTransport, open_transport
from vescale_pipe.errors import RankError, TransportError

CPU = torch.device("cpu")


def opened(timeout: float = 20.0) -> GroupTransport:
    transport = open_transport(None, CPU, timeout)
    transport.label = lambda tag: f"message {tag}"
    return transport


@pytest.mark.ranks(2)
def test_layouts_change_freely(rank: int) -> None:
    """Small and large, more and fewer tensors, none; in each order, received as it was sent."""
    small, large = torch.arange(6.0).view(2, 3), torch.arange(40000.0).view(4, 10000)
    cases = [
        [small],
        [small],
        [large],
        [large],
        [small],
        [large, small.t()],
        [large[:2], None, 3],
        [large[:2], None, 4],
        [],
        [None],
        [torch.zeros(0, 4), large, torch.zeros(0)],
        [torch.zeros(0, 4), large, torch.zeros(0)],
        [large[:, :9000].contiguous()],
        ["x" * 3000, small],
        ["x" * 3000, small],
        [{"a": small.bool()}],
        [torch.ones(())],
        [large.to(torch.bfloat16)],
        [small[:1]],
        [small],
    ]
    transport = opened()
    for values in cases:
        if rank == 0:
            transport.send(1, 3, values).wait()
            continue
        got = transport.recv(0, 3).wait()
        assert len(got) == len(values)
        for one, want in zip(got, values, strict=True):
            if isinstance(want, torch.Tensor):
                assert torch.equal(one, want)
                assert one.stride() == want.stride()
            elif isinstance(want, dict):
                assert torch.equal(one["a"], want["a"])
            else:
                assert one == want
    transport.close()


@pytest.mark.ranks(2)
def test_an_unchanged_layout_costs_one_call(rank: int) -> None:
    transport = opened()
    calls = []
    group = transport._open()

    class Counting:
        def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> object:
            calls.append(tensors[0].numel() * tensors[0].element_size())
            return group.send(tensors, dst, tag)

    if rank == 0:
        transport._group = Counting()  # type: ignore[assignment]
        counts = []
        for number in range(4):
            transport.send(1, 0, [torch.full((8,), float(number)), None]).wait()
            counts.append(len(calls))
            calls.clear()
        assert counts == [2, 1, 1, 1]
    else:
        for number in range(4):
            got = transport.recv(0, 0).wait()
            assert got[1] is None
            assert torch.equal(got[0], torch.full((8,), float(number)))
    dist.barrier()


@pytest.mark.ranks(2)
def test_messages_are_asked_for_ahead_and_cross(rank: int) -> None:
    """Both send before they receive; tags come in another order than they were sent."""
    transport = opened()
    other = 1 - rank
    for step in range(3):
        expected = [transport.recv(other, tag) for tag in (2, 0, 1)]
        sent = [transport.send(other, tag, [torch.full((step + 1, 2), float(tag))]) for tag in (0, 1, 2)]
        for tag, one in zip((2, 0, 1), expected, strict=True):
            assert torch.equal(one.wait()[0], torch.full((step + 1, 2), float(tag)))
        for one in sent:
            one.wait()
    assert not transport.pending
    transport.close()


@pytest.mark.ranks(2)
def test_gradient_flags_and_devices(rank: int) -> None:
    transport = opened()
    x = torch.ones(2, requires_grad=True)
    if rank == 0:
        transport.send(1, 0, [x * 2, x.detach()]).wait()
        transport.send(1, 0, [(x * 2).detach(), x]).wait()
    else:
        for want in ([True, False], [False, True]):
            got = transport.recv(0, 0).wait()
            assert [one.requires_grad for one in got] == want
            assert all(one.is_leaf for one in got)
    transport.close()


@pytest.mark.ranks(3)
def test_a_rank_that_aborts_wakes_all_with_its_text(rank: int) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0: it gets the text of rank 0, long before the time is over."""
    transport = opened(timeout=500)
    dist.barrier()
    if rank == 0:
        try:
            raise ValueError("first")
        except ValueError as error:
            transport.abort(f"at 0F0: {error}")
        with pytest.raises(TransportError, match="make a new engine on all ranks"):
            transport.send(1, 0, [1])
        return
    text = rf"^rank 0 failed at 0F0: first\n\(rank {rank} waited for message 7 from rank {rank - 1}\)"
    with pytest.raises(RankError, match=text) as caught:
        transport.recv(rank - 1, 7).wait()
    transport.abort(str(caught.value))


@pytest.mark.ranks(2)
def test_a_send_that_nobody_takes_ends_too(rank: int) -> None:
    transport = opened(timeout=500)
    dist.barrier()
    if rank == 0:
        transport.recv(1, 9)  # asked for, and never coming
        transport.abort("gone wrong")
    else:
        with pytest.raises(RankError, match=r"^rank 0 failed gone wrong\n\(rank 1 waited for message 3 to rank 0\)"):
            transport.send(0, 3, [torch.zeros(100000)]).wait()
        transport.abort("second")


@pytest.mark.ranks(2)
def test_a_new_pipeline_after_a_failed_one(rank: int) -> None:
    for attempt in range(2):
        transport = opened()
        if attempt == 0:
            transport.abort("both")
            continue
        if rank == 0:
            transport.send(1, 0, [attempt]).wait()
        else:
            assert transport.recv(0, 0).wait() == [1]
        transport.close()


@pytest.mark.ranks(2)
def test_a_dead_process_is_named(rank: int) -> None:
    transport = opened(timeout=500)
    if rank == 0:
        transport.send(1, 0, [os.getpid()]).wait()
        with pytest.raises(TransportError, match="message 1 from rank 1 was lost, for rank 1 is gone"):
            transport.recv(1, 1).wait()
    else:
        transport.recv(0, 0).wait()
        transport._group = None  # what the end of a process does to its connections
        transport.close()


@pytest.mark.ranks(2)
def test_a_stuck_rank_is_named(rank: int) -> None:
    transport = opened(timeout=0.2)
    if rank == 0:
        with pytest.raises(
            TransportError, match=r"message 1 from rank 1 did not come through within 0.2 s.*rank 1 is stuck"
        ):
            transport.recv(1, 1).wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_that_disagree_about_a_message_are_told(rank: int) -> None:
    transport = opened()
    if rank == 0:
        for _ in range(3):
            transport.send(1, 0, [torch.zeros(3)]).wait()
    else:
        transport.recv(0, 0).wait()
        transport._seen.clear()  # as if this rank had never received it
        with pytest.raises(TransportError, match="do all ranks run the same schedule and model"):
            transport.recv(0, 0).wait()
        transport.recv(0, 0)
    dist.barrier()
