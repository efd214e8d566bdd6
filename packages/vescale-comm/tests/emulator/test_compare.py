"""Recordings and their comparison: what is named as the first difference."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_comm.emulator import compare, emulate, record


def run(program, world=3, backend="gloo", keep=False):
    """Record a program on emulated ranks."""

    def main(rank):
        with record(keep) as recording:
            program(rank, recording)
        return recording

    return emulate(main, world, backend)


def pipeline(broken=-1):
    """Return a program in which values travel 0, 1, 2 and are summed at the end; one rank may compute wrongly."""

    def program(rank, recording):
        value = torch.arange(3.0)
        if rank:
            dist.recv(value, rank - 1)
        value = value + 1 + (rank == broken)
        recording.note("value", value)
        if rank < 2:
            dist.send(value, rank + 1)
        dist.all_reduce(value)

    return program


def test_equal_runs():
    one, other = run(pipeline()), run(pipeline())
    assert compare(one, other) is None
    assert [event.op for event in one[1].events] == ["recv", "note", "send", "all_reduce"]
    assert one[1].events[2].describe() == "send 0 with rank 2 of ranks 0, 1, 2 (float32[3])"
    assert one == pickle.loads(pickle.dumps(one))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_rank_that_computed_something_else_is_named_and_not_those_that_it_infected(broken):
    found = compare(run(pipeline(broken)), run(pipeline()))
    assert (found.rank, found.op, found.what, found.tensor) == (broken, "note", "note", "value")
    assert str(found).startswith(f"Rank {broken}: 'value' (float32[3]) differs")
    if broken:
        assert "the last thing that was the same was recv 0 with rank" in str(found)


def test_values_that_enter_a_collective():
    def program(wrong):
        return lambda rank, recording: dist.all_reduce(torch.full((2,), float(rank + (wrong and rank == 2))))

    found = compare(run(program(True)), run(program(False)))
    assert (found.rank, found.what, found.tensor) == (2, "input", "input 0")
    assert "nothing was recorded before it" in found.text


def test_another_order_of_additions_is_named_where_tensors_are_kept():
    def program(rank, recording):
        generator = torch.Generator().manual_seed(rank)
        dist.all_reduce(torch.randn(1000, generator=generator))

    found = compare(run(program, 4, "nccl_tree", keep=True), run(program, 4, keep=True))
    assert (found.rank, found.op, found.what) == (0, "all_reduce", "output")
    assert "Order of additions in the run: nccl_tree, in the reference: gloo." in found.text
    assert "of 1000 elements differ, the first is element" in found.text


def test_other_calls_and_early_ends():
    def program(calls):
        def main(rank, recording):
            for _ in range(calls):
                dist.barrier()
            if calls == 2:
                dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX)

        return main

    found = compare(run(program(1)), run(program(3)))
    assert (found.what, found.op, found.index) == ("missing", "nothing", 1)
    assert found.text == "Rank 0: the run ends before barrier 1 of ranks 0, 1, 2 ()."
    found = compare(run(program(2)), run(program(3)))
    assert (found.what, found.op, found.index) == ("call", "all_reduce", 2)
    assert "calls all_reduce(max) 2 of ranks 0, 1, 2 (float32[1]), but in the reference barrier 2" in found.text
    found = compare(run(program(3)), run(program(1)))
    assert found.text.startswith("Rank 0: the reference ends before barrier 1")


def test_modules_are_noted_with_the_names_of_their_parameters():
    def program(scale):
        def main(rank, recording):
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            model(torch.ones(1, 2)).sum().mul(scale if rank == 1 else 1).backward()
            recording.note_module(model, "step 0")

        return main

    found = compare(run(program(2)), run(program(1)))
    assert (found.rank, found.tensor) == (1, "step 0 gradient weight")


def test_recordings_of_other_ranks_are_refused():
    one = run(pipeline())
    with pytest.raises(ValueError, match=r"same ranks in the same order; got \[0, 1, 2\] and \[2, 1, 0\]"):
        compare(one, one[::-1])


def communicate(rank):
    """Use calls of many kinds, and return the recording."""
    world = dist.get_world_size()
    with record() as recording:
        mine = torch.randn(world * 4, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(mine.clone())
        dist.reduce(mine.clone(), 1)
        dist.broadcast(mine.clone(), 1)
        dist.all_gather([torch.zeros(4) for _ in range(world)], mine[:4])
        dist.all_gather_into_tensor(torch.zeros(world * world * 4), mine)
        dist.reduce_scatter_tensor(torch.zeros(4), mine)
        dist.reduce_scatter(torch.zeros(4), list(mine.split(4)))
        dist.all_to_all_single(torch.zeros(world * 4), mine)
        dist.all_to_all([torch.zeros(4) for _ in range(world)], list(mine.split(4)))
        dist.gather(mine, [torch.zeros(world * 4) for _ in range(world)] if rank == 1 else None, dst=1)
        dist.scatter(torch.zeros(4), list(mine.split(4)) if rank == 0 else None, src=0)
        dist.barrier()
        after = dist.isend(mine, (rank + 1) % world)
        dist.recv(torch.zeros(world * 4), (rank - 1) % world)
        after.wait()
        with dist._coalescing_manager():
            dist.all_reduce(mine)
            dist.all_reduce(torch.ones(3))
    return recording


@pytest.mark.ranks(3, timeout=120)
def test_a_real_run_and_an_emulated_one_are_recorded_alike(rank, world):
    real = communicate(rank).gather()
    assert [one.rank for one in real] == [0, 1, 2]
    if rank == 0:
        emulated = emulate(communicate, world, self_test=False)  # which has tests of its own
        assert compare(emulated, real) is None
        assert compare(real, emulated) is None
        names = [event.op for event in real[0].events]
        assert len(names) == 15
        assert names == [event.op for event in emulated[0].events]
        assert all(event.after for event in real[1].events if event.op not in ("barrier", "send", "recv"))
