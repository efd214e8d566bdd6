"""Short messages over sockets of the system: what arrives, in what order, and what is told when nothing can come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from vescale_pipe._transport.links import LONGEST, Link, Links, connect

LIMIT = timedelta(seconds=20)
SHORT = timedelta(milliseconds=200)
NAME = "vescale_pipe-test-stranger"


def pair(limit: timedelta = LIMIT) -> tuple[Link, Link]:
    """Two ends of one connection, each with the connections of a process of its own."""
    ends = []
    for sock in socket.socketpair():
        links = Links(limit)
        links.add(0, sock)
        link = links.get(0)
        assert link is not None
        ends.append(link)
    return ends[0], ends[1]


def message(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def on_threads(*calls: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def test_messages_find_their_tags_in_any_order() -> None:
    a, b = pair()
    sent = {tag: message(size, tag) for tag, size in enumerate([0, 1, 7, 4096, LONGEST])}
    for tag, tensor in sent.items():
        a.send(tag, tensor.clone()).wait(LIMIT)
    for tag in (3, 0, 4, 2, 1):  # all but the first of these come early
        buffer = torch.full((sent[tag].numel() + 5,), 9, dtype=torch.uint8)
        b.post(tag, buffer).wait(LIMIT)
        assert torch.equal(buffer[:-5], sent[tag])
        assert (buffer[-5:] == 9).all()


def test_messages_of_one_tag_come_in_the_order_in_which_they_were_sent() -> None:
    a, b = pair()
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(6)]
    early = [b.post(5, one) for one in buffers[:3]]
    for value in range(6):
        a.send(5, torch.tensor([value], dtype=torch.uint8))
    late = [b.post(5, one) for one in buffers[3:]]
    for one in (*early, *late):
        one.wait(LIMIT)
    assert [int(one) for one in buffers] == list(range(6))


def test_a_sent_tensor_may_be_written_to_at_once() -> None:
    a, b = pair()
    works, tensor = [], message(LONGEST, 0)
    for value in range(40):  # more than the system takes, so most of it waits here
        tensor.fill_(value)
        works.append(a.send(value, tensor))

    def take() -> None:
        for value in range(40):
            buffer = torch.zeros(LONGEST, dtype=torch.uint8)
            b.post(value, buffer).wait(LIMIT)
            assert (buffer == value).all()

    on_threads(take, lambda: [work.wait(LIMIT) for work in works])


def test_two_ends_that_send_much_before_they_receive_do_not_block_each_other() -> None:
    ends = pair()
    count = 60

    def both(mine: Link, seed: int, theirs: int) -> None:
        works = [mine.send(tag, message(LONGEST, seed + tag)) for tag in range(count)]
        for work in works:
            work.wait(LIMIT)
        for tag in range(count):
            buffer = torch.empty(LONGEST, dtype=torch.uint8)
            mine.post(tag, buffer).wait(LIMIT)
            assert torch.equal(buffer, message(LONGEST, theirs + tag))

    on_threads(lambda: both(ends[0], 1000, 2000), lambda: both(ends[1], 2000, 1000))


def test_who_waits_for_one_still_serves_the_others() -> None:
    """Rank 0 waits for 1, which waits for 2, which waits until 0 has sent what did not fit."""
    (a, b), (c, d) = pair(), pair()
    zero, one, two = Links(LIMIT), Links(LIMIT), Links(LIMIT)
    for links, rank, link in ((zero, 1, a), (one, 0, b), (zero, 2, c), (two, 0, d)):
        links.add(rank, link.sock)
    e, f = pair()
    one.add(2, e.sock)
    two.add(1, f.sock)
    count = 30
    tiny = torch.ones(1, dtype=torch.uint8)

    def rank_0() -> None:
        for tag in range(count):
            zero.get(2).send(tag, message(LONGEST, tag))  # type: ignore[union-attr]
        zero.get(1).post(0, torch.zeros(1, dtype=torch.uint8)).wait(LIMIT)  # type: ignore[union-attr]

    def rank_1() -> None:
        one.get(2).post(0, torch.zeros(1, dtype=torch.uint8)).wait(LIMIT)  # type: ignore[union-attr]
        one.get(0).send(0, tiny).wait(LIMIT)  # type: ignore[union-attr]

    def rank_2() -> None:
        for tag in range(count):
            buffer = torch.empty(LONGEST, dtype=torch.uint8)
            two.get(0).post(tag, buffer).wait(LIMIT)  # type: ignore[union-attr]
            assert torch.equal(buffer, message(LONGEST, tag))
        two.get(1).send(0, tiny).wait(LIMIT)  # type: ignore[union-attr]

    on_threads(rank_0, rank_1, rank_2)


def test_who_waits_for_a_process_that_is_gone_is_told() -> None:
    a, b = pair()
    a.send(0, message(10, 0))
    a._links.close()
    buffer = torch.zeros(10, dtype=torch.uint8)
    b.post(0, buffer).wait(LIMIT)  # what was sent before still comes
    assert torch.equal(buffer, message(10, 0))
    with pytest.raises(RuntimeError, match="the connection ended"):
        b.post(1, buffer).wait(LIMIT)
    with pytest.raises(RuntimeError, match=r"connection|[Pp]ipe"):
        b.send(2, message(10, 0)).wait(LIMIT)


def test_who_waits_when_the_other_end_is_closed_wakes_up() -> None:
    a, b = pair()

    def wait() -> None:
        with pytest.raises(RuntimeError, match="the connection ended"):
            b.post(0, torch.zeros(1, dtype=torch.uint8)).wait(LIMIT)

    on_threads(wait, a._links.close)


def test_a_silent_process_is_not_waited_for_for_ever() -> None:
    a, b = pair(SHORT)
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.2 s"):
        b.post(0, torch.zeros(1, dtype=torch.uint8)).wait(SHORT)
    works = [a.send(tag, message(LONGEST, tag)) for tag in range(40)]
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.2 s"):
        works[-1].wait(SHORT)


def test_a_message_that_is_too_long_is_refused() -> None:
    a, b = pair()
    a.send(0, message(11, 0))
    with pytest.raises(RuntimeError, match="11 bytes came where at most 10 were expected"):
        b.post(0, torch.zeros(10, dtype=torch.uint8)).wait(LIMIT)


def test_ranks_of_a_host_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store, found = HashStore(), dict[int, Links]()

    def rank(number: int) -> None:
        found[number] = connect(store, number, 3, LIMIT)

    on_threads(*(lambda number=number: rank(number) for number in range(3)))
    assert [len(found[number]) for number in range(3)] == [2, 2, 2]
    for src in range(3):
        for dst in range(3):
            if src != dst:
                found[src].get(dst).send(7, torch.tensor([src], dtype=torch.uint8))  # type: ignore[union-attr]
                buffer = torch.zeros(1, dtype=torch.uint8)
                found[dst].get(src).post(7, buffer).wait(LIMIT)  # type: ignore[union-attr]
                assert int(buffer) == src
    for links in found.values():
        links.close()
    monkeypatch.setenv("VESCALE_PIPE_LINKS", "0")
    assert len(connect(HashStore(), 0, 1, LIMIT)) == 0


def test_ranks_of_other_hosts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_pipe._transport import links

    names = {"first": "a", "second": "b"}
    monkeypatch.setattr(links, "_place", lambda: names[threading.current_thread().name])
    store, found = HashStore(), dict[int, Links]()
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: connect(store, n, 2, LIMIT)}), name=name, daemon=True)
        for n, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {rank: len(one) for rank, one in found.items()} == {0: 0, 1: 0}


def test_a_stranger_is_turned_away() -> None:
    """A socket of the system has a name that others on the host can see."""
    from vescale_pipe._transport import links

    listener = links._listen(NAME, 4)
    assert listener is not None
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{NAME}")
        stranger.sendall(bytes(24))
        assert links._answer(listener, b"\1" * 16) is None
        known = links._dial(NAME, b"\1" * 16, 3)
        assert known is not None
        answer = links._answer(listener, b"\1" * 16)
        assert answer is not None
        assert answer[0] == 3
        answer[1].close()
        known.close()
