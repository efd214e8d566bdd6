"""What of a tensor is on this rank: of plain tensors, DTensors, and those that are still on their way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

from vescale_comm._gradients import is_plain, local_of
from vescale_comm._optimizer.norms import get_total_norm
from vescale_comm._optimizer.parts import part_of


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_plain_tensors_are_their_own_part() -> None:
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert local_of(tensor) is tensor
        assert is_plain(tensor)


@pytest.mark.usefixtures("alone")
def test_the_part_of_a_dtensor_is_its_memory() -> None:
    """The object itself, so that an optimizer can give it other memory."""
    mesh = init_device_mesh("cpu", (1,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, [Shard(0)]))
    assert not is_plain(parameter)
    assert local_of(parameter) is parameter._local_tensor
    assert part_of(parameter, "w").local() is parameter._local_tensor


@pytest.mark.ranks(2)
def test_what_is_on_its_way_is_waited_for(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    pending = DTensor.from_local(torch.full((3,), float(rank + 1)), mesh, [Partial()])
    coming = pending.redistribute(placements=[Replicate()], async_op=True)
    assert type(coming._local_tensor) is not torch.Tensor
    local = local_of(coming)
    assert type(local) is torch.Tensor
    assert local.tolist() == [3.0, 3.0, 3.0]
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    parameter.grad = pending.redistribute(placements=[Replicate()], async_op=True)
    assert float(get_total_norm([parameter])) == pytest.approx(27**0.5)
