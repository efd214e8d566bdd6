"""The self-test against the gloo at hand."""

import pytest
import torch
import torch.distributed as dist

from vescale_comm._emulator import selftest
from vescale_comm._emulator.gloo import GlooOrder
from vescale_comm.emulator import CanonicalOrder, check_order, emulate
from vescale_comm.errors import CommError


def test_the_gloo_at_hand_adds_as_expected():
    result = check_order()
    assert result
    assert (result.world_size, result.sizes, result.differing) == (3, (1, 31, 4099, 1_700_003), ())


def test_an_order_that_differs_is_found(monkeypatch):
    monkeypatch.setattr(GlooOrder, "segments", CanonicalOrder.segments)
    result = check_order(sizes=[1, 100], dtypes=[torch.float32])
    assert not result
    assert "all_reduce of 100 elements of torch.float32 on 3 ranks" in result.differing
    selftest.require_gloo_order.cache_clear()
    with pytest.raises(CommError, match="adds in another order than vescale_comm knows: all_reduce"):
        emulate(print, 2)
    assert emulate(lambda rank: rank, 2, self_test=False) == [0, 1]
    monkeypatch.undo()
    assert emulate(lambda rank: rank, 2) == [0, 1]


@pytest.mark.ranks(2, timeout=120)
def test_on_a_group_of_real_ranks(rank, world):
    assert check_order(dist.group.WORLD, sizes=[1, 1000])
