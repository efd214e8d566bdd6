"""The simulator, beside one that moves all streams forward from event to event."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_comm._report.simulate import COMPUTE, Task, simulate


def run_slowly(tasks, overlap):
    """Return the end of each task: at each moment every stream works on its first task that may run."""
    left = [float(task.seconds) for task in tasks]
    ends: list[float | None] = [None] * len(tasks)
    now = 0.0
    while None in ends:
        running = {}
        for index, task in enumerate(tasks):
            if ends[index] is None and task.stream not in running:
                running[task.stream] = index
        ready = [i for i in running.values() if all(ends[j] is not None for j in tasks[i].after)]
        done = [i for i in ready if left[i] <= 1e-12]
        if done:
            for i in done:
                ends[i] = now
            continue
        others = [tasks[i].speed for i in ready if tasks[i].stream != COMPUTE]
        slowed = min((overlap if one is None else one for one in others), default=1.0)
        speed = {i: slowed if tasks[i].stream == COMPUTE else 1.0 for i in ready}
        step = min(left[i] / speed[i] for i in ready if speed[i])
        now += step
        for i in ready:
            left[i] -= step * speed[i]
    return ends


def steps(dice):
    """Tasks in the order of their launch: whatever follows a computation comes before the next one."""
    tasks: list[Task] = []
    for number in range(dice.randint(1, 12)):
        after = dice.sample(range(len(tasks)), min(len(tasks), dice.randint(0, 3)))
        tasks.append(Task(f"c{number}", COMPUTE, dice.randint(0, 5), tuple(after)))
        here = len(tasks) - 1
        computed = [index for index, task in enumerate(tasks) if task.stream == COMPUTE]
        for _ in range(dice.randint(0, 3)):
            stream = dice.choice(["dp", "tp"])
            speed = dice.choice([None, None, 0.0, 0.5, 1.0])
            tasks.append(Task(stream, stream, dice.randint(0, 5), (here, dice.choice(computed)), speed=speed))
    return tasks


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_equals_the_slow_simulator(seed, overlap):
    tasks = steps(random.Random(seed))
    found = simulate(tasks, overlap)
    assert [span.end for span in found.spans] == pytest.approx(run_slowly(tasks, overlap))
    assert found.seconds == pytest.approx(max(span.end for span in found.spans))


def test_memory_is_that_of_the_busiest_moment():
    tasks = [
        Task("gather a", "net", 1, takes=10),
        Task("a", COMPUTE, 2, (0,), gives=10),
        Task("gather b", "net", 1, takes=7),
        Task("b", COMPUTE, 1, (2,), gives=7),
        Task("c", COMPUTE, 1, takes=16, gives=16),
    ]
    found = simulate(tasks)
    assert [(span.start, span.end) for span in found.spans] == [(0, 1), (1, 3), (1, 2), (3, 4), (4, 5)]
    assert found.peak == 17
    assert simulate([]).seconds == simulate([]).peak == 0.0


def test_processors_that_communication_takes_away():
    tasks = [Task("a", COMPUTE, 1), Task("send", "net", 4, (0,)), Task("b", COMPUTE, 3)]
    for overlap, seconds in ((1.0, 5.0), (0.5, 6.0), (0.25, 7.0), (0.0, 8.0)):
        assert simulate(tasks, overlap).seconds == seconds


def test_speeds_of_single_tasks():
    tasks = [Task("send", "net", 4, speed=0.5), Task("also", "far", 2, speed=0.0), Task("a", COMPUTE, 3)]
    # Nothing for 2, half the speed until 4, the rest after it.
    assert [span.end for span in simulate(tasks).spans] == [4, 2, 6]
    assert simulate([tasks[0], tasks[2]], overlap=0).seconds == 5
