"""The store of an emulated world, called directly and through torch's own classes."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from vescale_comm.emulator import DeadlockError, emulate


def store():
    """Return the store of the default group."""
    return dist.group.WORLD.get_group_store()


def test_values_are_shared_and_waited_for():
    def program(rank):
        if rank == 1:
            assert store().check(["late"]) is False
            assert store().add("count", 2) == 2
            store().set("early", "from 1")
            return store().get("late")
        assert store().get("early") == b"from 1"
        assert store().add("count", 3) == 5
        assert store().compare_set("early", "other", "changed") == b"from 1"
        assert store().compare_set("early", "from 1", "changed") == b"changed"
        store().set("late", b"from 0")
        assert store().delete_key("early")
        assert not store().delete_key("early")
        store().append("late", " again")
        store().multi_set(["a", "b"], ["1", "2"])
        assert store().multi_get(["a", "b"]) == [b"1", b"2"]
        assert store().check(["a", "late"])
        return store().num_keys() > 3

    assert emulate(program, 2) == [True, b"from 0 again"]


def test_groups_do_not_see_each_others_keys():
    def program(rank):
        other = dist.new_group([0, 1])
        other.get_group_store().set("key", "other")
        return store().check(["key"])

    assert emulate(program, 2) == [False, False]


def test_a_wait_with_a_time_ends_where_nobody_is_left():
    def program(rank):
        with pytest.raises(dist.DistStoreError, match="no rank is left that could set"):
            store().wait(["never"], timedelta(seconds=1))
        return True

    assert emulate(program, 2) == [True, True]


def test_a_wait_without_a_time_is_a_deadlock():
    with pytest.raises(DeadlockError, match=r"waits for the keys \['.*never'\] of the store"):
        emulate(lambda rank: store().get("never"), 2)
