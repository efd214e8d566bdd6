"""All ranks in one process."""

import threading

import pytest
import torch

from vescale_pipe._transport import LocalHub
from vescale_pipe.errors import RankError, TransportError


def test_messages_are_copies_and_tags_overtake() -> None:
    hub = LocalHub(2)
    a, b = hub.transport(0), hub.transport(1)
    x = torch.ones(2, requires_grad=True)
    a.send(1, 5, [x * 2]).wait()
    a.send(1, 6, [None, 4]).wait()
    late, early = b.recv(0, 5), b.recv(0, 6)
    assert early.ready()
    assert early.wait() == [None, 4]
    (got,) = late.wait()
    assert torch.equal(got, torch.tensor([2.0, 2.0]))
    assert got.is_leaf
    assert got.requires_grad
    assert not b.recv(0, 5).ready()


def test_a_thread_waits_for_a_message() -> None:
    hub = LocalHub(2)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(hub.transport(1).recv(0, 1).wait()))
    thread.start()
    hub.transport(0).send(1, 1, [9])
    thread.join(10)
    assert got == [9]


def test_failure_reaches_who_waits_and_names_the_message() -> None:
    hub = LocalHub(2)
    end = hub.transport(1)
    end.label = lambda tag: f"message number {tag}"
    hub.transport(0).abort("it broke")
    hub.transport(1).abort("later")
    with pytest.raises(RankError, match=r"^rank 0 failed it broke\n\(rank 1 waited for message number 3\)$"):
        end.recv(0, 3).wait()
    hub.reset()
    hub.transport(0).send(1, 3, [1])
    assert end.recv(0, 3).wait() == [1]


def test_a_message_that_does_not_come_ends_the_wait() -> None:
    hub = LocalHub(2, timeout=0.01)
    with pytest.raises(TransportError, match=r"rank 1: 3 from rank 0 did not come within 0.01 s"):
        hub.transport(1).recv(0, 3).wait()


def test_a_message_left_over_is_told() -> None:
    hub = LocalHub(2)
    hub.transport(0).send(1, 3, [1])
    with pytest.raises(TransportError, match="sent to rank 1 twice"):
        hub.transport(0).send(1, 3, [1])
