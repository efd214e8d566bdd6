"""Collectives under way: waits that are repeated, fail, or are interrupted; memory that is lent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import PeerTransport, RankOrderTransport, rooms
from vescale_comm._transport.rooms import Rooms
from vescale_comm._transport.running import Message, Running, posted
from vescale_comm.errors import TransportError


class Work:
    """What a backend returns; it may be asked once."""

    def __init__(self, error=None):
        self.error, self.asked = error, 0

    def wait(self):
        self.asked += 1
        assert self.asked == 1
        if self.error is not None:
            raise self.error


def explain(message, error):
    return TransportError(f"{message.verb if message else 'a step'}: {error!r}")


def test_steps_go_on_when_their_messages_are_there():
    done, works = [], [Work(), Work(), Work()]

    def steps():
        yield [Message(works[0], "first"), Message(works[1], "second")]
        done.append([work.asked for work in works])
        yield [Message(works[2], "third")]
        done.append([work.asked for work in works])

    running = Running(steps(), explain)
    assert done == []
    assert not running.finished
    running.wait()
    running.wait()
    assert done == [[1, 1, 0], [1, 1, 1]]
    assert running.finished


def test_earlier_ones_are_finished_before():
    order = []

    def steps(name):
        yield [Message(Work(), name)]
        order.append(name)

    first = Running(steps("first"), explain)
    second = Running(steps("second"), explain, (first,))
    second.wait()
    first.wait()
    assert order == ["first", "second"]
    failed = Running(iter([[Message(Work(RuntimeError("lost")), "sending")]]), explain)
    after = Running(steps("after"), explain, (failed,))
    for _ in range(2):
        with pytest.raises(TransportError, match="sending: RuntimeError"):
            after.wait()
    assert order == ["first", "second"]


def test_a_failure_is_told_to_all_who_ask():
    running = Running(iter([[Message(Work(RuntimeError("lost")), "sending")]]), explain)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"sending: RuntimeError\('lost'\)"):
            running.wait()

    def broken():
        yield [Message(Work(), "sending")]
        raise NotImplementedError("no kernel")

    running = Running(broken(), explain)
    for _ in range(2):
        with pytest.raises(TransportError, match="a step: NotImplementedError"):
            running.wait()


def test_an_interrupted_wait_does_not_pass_for_a_finished_one():
    running = Running(iter([[Message(Work(KeyboardInterrupt()), "sending")]]), explain)
    with pytest.raises(KeyboardInterrupt):
        running.wait()
    with pytest.raises(TransportError, match="sending: KeyboardInterrupt"):
        running.wait()


def test_rooms_are_lent_once_and_kept(monkeypatch):
    monkeypatch.setattr(rooms, "KEEP", 1000)
    lender, cpu = Rooms(), torch.device("cpu")
    one, first = lender.take(100, torch.float32, cpu)
    _, second = lender.take(100, torch.float32, cpu)
    assert one.shape == (100,)
    assert first.data_ptr() != second.data_ptr()
    lender.give_back(first)
    half, again = lender.take(100, torch.bfloat16, cpu)
    assert again is first
    assert half.data_ptr() == first.data_ptr()
    assert lender.take(0, torch.float32, cpu)[0].shape == (0,)
    for room in (first, second):
        lender.give_back(room)
    _, large = lender.take(500, torch.float64, cpu)
    lender.give_back(large)  # more than is kept
    assert lender.take(500, torch.float64, cpu)[1] is not large


@pytest.mark.ranks(2)
def test_messages_of_two_transports_do_not_meet(rank):
    """Each rank calls them in another order, and users' messages of small tags go on beside."""
    transports = [PeerTransport(dist.group.WORLD) for _ in range(2)]
    buffers = [torch.full((2000,), float(10 * which + rank)) for which in range(2)]
    own, other = torch.full((2000,), 7.0 + rank), torch.zeros(2000)
    works = [dist.irecv(other, 1 - rank), dist.isend(own, 1 - rank)]
    order = (0, 1) if rank else (1, 0)
    started = {which: transports[which].all_gather(buffers[which]) for which in order}
    for work in [*started.values(), *works]:
        work.wait()
    for which in range(2):
        assert buffers[which].tolist() == [10.0 * which] * 1000 + [10.0 * which + 1] * 1000
    assert other[0].item() == 8.0 - rank
    with pytest.raises(TransportError, match="all_reduce of 2 float32 needs a second group"):
        RankOrderTransport(dist.group.WORLD).all_reduce(torch.zeros(2))


def test_what_the_backend_does_not_even_take_fails_where_it_is_waited_for():
    def refuse():
        raise RuntimeError("Connection closed by peer")

    def steps():
        yield [posted(refuse, "sending to", 3)]

    running = Running(steps(), lambda message, error: TransportError(f"{message.verb} rank {message.peer}: {error}"))
    with pytest.raises(TransportError, match="sending to rank 3: Connection closed by peer"):
        running.wait()
    assert running.finished
