"""Messages of a pipeline are recorded on both of their ends."""

import pytest
import torch

from vescale_pipe import timeline
from vescale_pipe._transport import LocalHub
from vescale_pipe.errors import RankError


def test_a_message_has_two_ends_with_one_key() -> None:
    hub = LocalHub(2)
    # Rank 0 and 1 of the pipeline are 4 and 6 in the world.
    first = timeline.RecordedTransport(hub.transport(0), [4, 6])
    second = timeline.RecordedTransport(hub.transport(1), [4, 6])
    first.label = second.label = "message {}".format
    with timeline.record() as recorded:
        timeline.step(5)
        expected = second.recv(0, 7)
        assert not expected.ready()
        sent = first.send(1, 7, [torch.ones(2), None])
        assert expected.ready()
        timeline.step(6)  # a step later, what was asked for in this one is let go
        values = expected.wait()
        sent.wait()
    assert torch.equal(values[0], torch.ones(2))
    recv, send = recorded.spans
    assert (recv.name, send.name) == ("message 7", "message 7")
    assert (recv.step, send.step, recv.track) == (5, 5, -1)
    assert recv.start <= send.start <= recv.end
    assert {**recv.tags, "blocked": 0} == {"direction": "recv", "peer": 4, "key": 7, "blocked": 0}
    assert {**send.tags, "blocked": 0} == {"direction": "send", "peer": 6, "key": 7, "blocked": 0}
    assert 0 <= recv.tags["blocked"] <= recv.length


def test_labels_change_with_the_schedule() -> None:
    transport = timeline.RecordedTransport(LocalHub(1).transport(0))
    with timeline.record() as recorded:
        for text in ("old {}", "new {}"):
            transport.label = text.format
            assert transport.inner.label(3) == text.format(3)
            transport.send(0, 3, [1])
            transport.recv(0, 3).wait()
    assert [span.name for span in recorded.spans] == ["old 3", "new 3"]


def test_what_fails_is_not_recorded_and_goes_on() -> None:
    hub = LocalHub(2)
    transport = timeline.RecordedTransport(hub.transport(1))
    with timeline.record() as recorded:
        expected = transport.recv(0, 1)
        transport.abort("it broke")
        with pytest.raises(RankError, match="it broke"):
            expected.wait()
        transport.close()
    assert recorded.spans == []


def test_off_it_records_nothing() -> None:
    transport = timeline.RecordedTransport(LocalHub(1).transport(0))
    sent = transport.send(0, 3, [1])
    with timeline.record() as recorded:
        pass
    assert transport.recv(0, 3).wait() == [1]
    sent.wait()
    assert recorded.spans == []
