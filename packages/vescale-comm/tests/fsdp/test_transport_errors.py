"""Collectives that fail or are interrupted: errors name the unit or the parameters, and nothing half-done is used."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_comm._fsdp import fully_shard
from vescale_comm._transport import FakeTransport
from vescale_comm.errors import TransportError


class Faulty(FakeTransport):
    """One rank, of which some wait fails, or some call."""

    def __init__(self) -> None:
        super().__init__(1)
        self.faults: dict[str, BaseException] = {}
        """By operation, and by operation and "wait"; each happens once."""

    def _try(self, name: str) -> None:
        fault = self.faults.pop(name, None)
        if fault is not None:
            raise fault

    def _over(self, name: str, work: Any) -> Any:
        outer = self

        class Work:
            def wait(self) -> None:
                outer._try(f"{name} wait")
                work.wait()

        return Work()

    def all_gather(self, buffer: Tensor) -> Any:
        """See `Transport`; rows of flags are small and left alone."""
        if buffer.dtype == torch.uint8:
            return super().all_gather(buffer)
        self._try("all_gather")
        return self._over("all_gather", super().all_gather(buffer))

    def reduce_scatter(self, buffer: Tensor, **options: Any) -> Any:
        """See `Transport`."""
        self._try("reduce_scatter")
        return self._over("reduce_scatter", super().reduce_scatter(buffer, **options))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


GATHERED = r"While the parameters of 0 were gathered: rank 1 is gone"
REDUCED = r"While gradients of 1\.weight \.\.\. 1\.bias \(2\) were reduced: rank 1 is gone"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("all_gather", GATHERED),
        ("all_gather wait", GATHERED),
        ("reduce_scatter", REDUCED),
        ("reduce_scatter wait", REDUCED),
    ],
)
@pytest.mark.parametrize("error", [TransportError("rank 1 is gone"), KeyboardInterrupt()], ids=["fails", "interrupted"])
@pytest.mark.usefixtures("alone")
def test_what_a_fault_leaves_is_not_used(fault: str, text: str, error: BaseException) -> None:
    """The next step is right, whatever the fault left: were it half-gathered parameters, these would be garbage."""
    transport = Faulty()
    model, twin = fully_shard(net(), units=["0", "1"], transport=transport), net()
    x = torch.ones(4, 2)
    for step in range(3):
        transport.faults = {fault: copy.copy(error)} if step == 1 else {}
        if step == 1 and isinstance(error, TransportError):
            with pytest.raises(TransportError, match=text):
                model(x).square().sum().backward()
        elif step == 1:
            with pytest.raises(KeyboardInterrupt):
                model(x).square().sum().backward()
        if step == 1:
            model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        twin.zero_grad()
        expected = twin(x).square().sum()
        expected.backward()
        assert torch.equal(loss, expected)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad.flatten())
        model.zero_grad()


def leave(group: dist.ProcessGroup) -> None:
    """Close the connections of a group to rank 0, which then gets no message, without waiting for a time-out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], 0, 7).wait(timedelta(milliseconds=1))


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named_with_what_it_was_for(rank: int) -> None:
    group = dist.new_group()
    model = fully_shard(net(), group, units=["0", "1"], transport="p2p")
    x = torch.ones(4, 2)
    model(x).sum().backward()
    if rank == 1:
        leave(group)
    else:
        with pytest.raises(TransportError, match=r"While the parameters of (0|1) were gathered: rank 0: .*rank 1"):
            model(x)
    dist.barrier()
