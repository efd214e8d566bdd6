"""The transport that counts: its bytes against those of parts that are sent one by one."""

from __future__ import annotations

import pytest
import torch

from vescale_comm._transport import FakeTransport


def bytes_of_exchange(numel, size, rank):
    """Sum the messages of a direct exchange of float32, in two rounds."""
    parts = [part.numel() for part in torch.empty(numel).tensor_split(size)]
    to_owners = sum(parts[q] for q in range(size) if q != rank)
    return 4 * (to_owners + parts[rank] * (size - 1))


@pytest.mark.parametrize(("numel", "size"), [(12, 4), (13, 4), (3, 5), (1000, 7), (5, 1)])
def test_all_reduce_counts_the_messages(numel, size):
    for rank in range(size):
        fake = FakeTransport(size, rank)
        fake.all_reduce(torch.zeros(numel)).wait()
        assert fake.calls[0].sent == bytes_of_exchange(numel, size, rank)


def test_counts_and_values_at_ten_thousand_ranks():
    fake = FakeTransport(10_000, rank=3)
    buffer = torch.ones(20_000, dtype=torch.bfloat16)
    fake.reduce_scatter(buffer, divisor=4, accumulate=torch.float32).wait()
    assert buffer[6:8].tolist() == [0.25, 0.25]
    fake.all_gather(buffer).wait()
    fake.broadcast(buffer, 3).wait()
    fake.broadcast(buffer, 4).wait()
    assert [(call.operation, call.sent) for call in fake.calls] == [
        ("reduce_scatter", 9_999 * 4),
        ("all_gather", 9_999 * 4),
        ("broadcast", 9_999 * 40_000),
        ("broadcast", 0),
    ]
    assert {call.nbytes for call in fake.calls} == {40_000}


def test_wrong_arguments_are_refused_as_everywhere():
    with pytest.raises(ValueError, match="0 <= rank < size; got rank 4 of 4"):
        FakeTransport(4, 4)
    fake = FakeTransport(4)
    with pytest.raises(ValueError, match="multiple of the number of ranks"):
        fake.reduce_scatter(torch.zeros(6))
    with pytest.raises(ValueError, match="cannot be divided"):
        fake.all_reduce(torch.zeros(6, dtype=torch.int32), divisor=2)
    assert fake.calls == []
    assert fake.allocate(3, torch.int8, torch.device("cpu")).tolist() == [0, 0, 0]
