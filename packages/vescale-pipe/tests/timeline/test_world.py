"""Recording on real ranks: clocks, meshes, messages, and ranks that fail."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale_pipe import timeline
from vescale_pipe.errors import PipeError


def exchange(rank: int, steps: int) -> None:
    """Send a tensor to the other rank and back, and record it as a runtime does."""
    from time import perf_counter_ns

    value = torch.zeros(4)
    for number in range(steps):
        timeline.step(number)
        with timeline.span("user", "step"):
            for key in ("there", "back"):
                posted = perf_counter_ns()
                if (rank == 0) == (key == "there"):
                    dist.send(value, 1 - rank)
                    timeline.recorder.message("send", 1 - rank, key, posted, perf_counter_ns())
                else:
                    dist.recv(value, 1 - rank)
                    done = perf_counter_ns()
                    timeline.recorder.message("recv", 1 - rank, key, posted, done, blocked=done - posted)


@pytest.mark.ranks(2)
def test_two_ranks_make_one_timeline(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with timeline.record(mesh=mesh, path=tmp_path) as recorded:
        exchange(rank, 3)
        timeline.sync()
        exchange(rank, 3)
    dist.barrier()
    data = recorded.data()
    assert data.coordinates == {"pp": rank, "dp": 0}
    # At the start, in between and at the end; nobody's clock is read by rank 0.
    assert len(data.readings) == 3 * rank
    # Both processes read one clock here: what a reading says is its error, and it knows how large that may be.
    for reading in data.readings:
        assert abs(reading.offset) <= reading.bound
        assert reading.parent == 0
    merged = timeline.merge(tmp_path)
    assert [one.name for one in merged.ranks] == ["rank 0 (pp=0, dp=0)", "rank 1 (pp=1, dp=0)"]
    assert len(merged.messages) == 12
    assert merged.unmatched == 0
    for message in merged.messages:
        assert message.send.start <= message.recv.end
    assert merged.ranks[0].shift == 0
    assert abs(merged.ranks[1].shift) <= merged.ranks[1].bound + 1
    trace = merged.to_chrome()["traceEvents"]
    assert sum(event["ph"] == "f" for event in trace) == 12


@pytest.mark.ranks(3)
def test_a_part_of_the_ranks_records_with_its_own_group(rank: int, world: int, tmp_path: Path) -> None:
    group = dist.new_group([2, 1])
    if rank:
        with timeline.record(group=group) as recorded, timeline.span("a", "b"):
            pass
        recorded.save(tmp_path)
        # Ranks of the world, though the pings went between ranks 0 and 1 of the group.
        assert [reading.parent for reading in recorded.data().readings] == ([] if rank == 1 else [1, 1])
    dist.barrier()
    merged = timeline.merge(tmp_path)
    assert [one.rank for one in merged.ranks] == [1, 2]
    assert merged.notes == ()


@pytest.mark.ranks(2)
def test_a_rank_that_fails_does_not_wait_for_the_others_clock(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        with pytest.raises(ZeroDivisionError), timeline.record(group=dist.group.WORLD, path=tmp_path):
            raise ZeroDivisionError
        assert timeline.current() is None
    else:
        timeline.start(group=dist.group.WORLD, path=tmp_path)
        timeline.stop(sync=False)
    dist.barrier()
    assert all(len(one.spans) == 0 for one in timeline.merge(tmp_path).ranks)


@pytest.mark.ranks(2)
def test_a_group_that_does_not_fit_is_refused_before_any_message(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    alone = [dist.new_group([number]) for number in range(2)][rank]
    with pytest.raises(ValueError, match=rf"rank {rank}: mesh has ranks \[0, 1\] and group has \[{rank}\]"):
        timeline.start(mesh=mesh, group=alone)
    assert timeline.current() is None
    with timeline.record(group=alone) as recorded:
        timeline.sync()
    assert recorded.data().readings == []


def test_without_other_ranks_there_is_no_clock_to_read() -> None:
    timeline.sync()  # nothing runs
    with timeline.record(), pytest.raises(PipeError, match="knows no other ranks"):
        timeline.sync()
