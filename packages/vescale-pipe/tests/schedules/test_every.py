"""What holds for every schedule with a name: it is complete, it can run, and both simulators agree about it."""

import pytest

from vescale_pipe._schedule import validate
from vescale_pipe._schedules.registry import BUILT_IN, TWO_CHUNKS, build_schedule, takes
from vescale_pipe._simulate import Costs, simulate

CASES = [
    (name, chunks)
    for name, build in BUILT_IN.items()
    for chunks in ((None,) if "chunks" not in takes(build) else (2,) if name in TWO_CHUNKS else (1, 2, 3, 4))
]


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_it_is_complete_in_order_and_can_run(checked, name, chunks, ranks):
    for count in sorted({1, 2, 3, ranks - 1 or 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1}):
        schedule = build_schedule(name, ranks, count, chunks=chunks)
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, count)
        assert schedule.num_stages == ranks * (chunks or 1)
        checked(schedule)
        validate(schedule, canonical=True)


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_both_simulators_agree(oracle, name, chunks):
    for ranks, count in [(2, 3), (3, 7), (4, 4)]:
        schedule = build_schedule(name, ranks, count, chunks=chunks)
        stages = range(schedule.num_stages)
        forward, inputs = [1 + stage / 8 for stage in stages], [1.5 - stage / 16 for stage in stages]
        costs = Costs(forward=forward, input_grad=inputs, weight_grad=0.75, latency=0.125, overlap=0.5)
        found = simulate(schedule, costs)
        run = oracle(schedule, forward, inputs, 0.75, latency=0.125, overlap=0.5)
        assert found.makespan == pytest.approx(run.makespan)
        assert found.busy == pytest.approx([run.makespan - idle for idle in run.idle])
        assert list(found.peak) == run.peak


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", None), ("1f1b", None), ("interleaved_1f1b", 2), ("zb_h1", None)]
)
def test_a_thousand_ranks_take_no_python_object_an_action(name, chunks):
    schedule = build_schedule(name, 1024, 256, chunks=chunks)
    kinds = 3 if name == "zb_h1" else 2
    assert schedule.num_actions == 1024 * 256 * kinds * (chunks or 1)
    assert not schedule._made
    # Rows of one table: a rank costs no allocation of its own.
    assert len({columns.stage.untyped_storage().data_ptr() for columns in schedule.columns}) == 1
