"""`run_ranks`: results, and the report for every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_testing import RankFailure, run_ranks


@dataclass
class Point:
    x: int


def failure(function: Any, world: int, **options: Any) -> str:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, world, **options)
    return str(caught.value)


def add(rank: int, world: int, base: int) -> tuple[int, int, torch.Tensor]:
    total = torch.full((2,), float(rank + base))
    dist.all_reduce(total)
    return rank, world, total


@pytest.mark.parametrize("pool", [False, True])
def test_results_come_back_in_the_order_of_ranks(pool: bool) -> None:
    results = run_ranks(add, 4, kwargs={"base": 1}, pool=pool)
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(4)]
    assert all(torch.equal(result[2], torch.full((2,), 10.0)) for result in results)


def move(rank: int, point: Point) -> Point:
    return Point(point.x + rank)


def test_objects_of_classes_in_the_test_file_travel_both_ways() -> None:
    assert run_ranks(move, 2, kwargs={"point": Point(3)}) == [Point(3), Point(4)]


def test_a_function_may_be_named_by_its_file() -> None:
    assert run_ranks(f"{__file__}::who", 2) == [0, 1]


def who(rank: int) -> int:
    return rank


def fail_on_rank_2(rank: int) -> None:
    limit = 4
    if rank == 2:
        assert rank + 3 == limit
    dist.barrier()


@pytest.mark.parametrize("pool", [False, True])
def test_the_first_failure_is_shown_whole_and_its_followers_in_one_line(pool: bool) -> None:
    text = failure(fail_on_rank_2, 4, pool=pool)
    assert text.startswith("rank 2 of 4 failed first: AssertionError: assert (2 + 3) == 4")
    assert "---- rank 2 of 4 failed first ----\nTraceback" in text
    assert "in fail_on_rank_2\n    assert rank + 3 == limit" in text
    assert text.count("Traceback") == 1
    followers = [line for line in text.splitlines() if " followed: RuntimeError: " in line]
    assert [line[:7] for line in followers] == ["rank 0 ", "rank 1 ", "rank 3 "]
    assert all(len(line) < 200 for line in followers)
    assert "vescale_testing" not in text


def fail_one_after_the_other(rank: int) -> None:
    if rank != 1:
        while not os.path.exists("/nonexistent"):
            time.sleep(0.3)
            break
    raise ValueError(f"rank {rank} does not like it")


def test_independent_failures_are_told_in_the_order_of_time() -> None:
    text = failure(fail_one_after_the_other, 2)
    first, second = text.index("---- rank 1 of 2 failed first"), text.index("---- rank 0 of 2 failed too")
    assert first < second
    assert text.startswith("rank 1 of 2 failed first: ValueError: rank 1 does not like it")


def fail_with_a_cause() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def test_causes_of_errors_are_shown() -> None:
    text = failure(fail_with_a_cause, 1)
    assert "KeyError: 'inner'" in text
    assert "direct cause" in text
    assert "ValueError: outer" in text


def hang(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.recv(torch.ones(1), 0)


@pytest.mark.parametrize("pool", [False, True])
def test_hung_ranks_show_their_stacks(pool: bool) -> None:
    text = failure(hang, 2, timeout=0.5, pool=pool)
    assert text.startswith("the time-out of 0.5 s is over, and of 2 ranks these still run: 0, 1")
    zero, one = text.split("---- rank 1 of 2 was still running")
    assert "in all_reduce" in zero
    assert "in recv" in one
    assert text.count("test_run_ranks.py") == 2
    assert "vescale_testing" not in text


def hang_alone(rank: int) -> None:
    if rank == 1:
        raise ValueError("no")
    if rank == 2:
        time.sleep(600)


def test_a_rank_that_does_not_notice_the_failure_is_stopped() -> None:
    text = failure(hang_alone, 3)
    assert text.startswith("rank 1 of 3 failed first: ValueError: no")
    assert "---- rank 2 of 3 was still running when its peers had ended ----" in text
    assert "in hang_alone" in text
    assert "---- without failure: 0 (ok) ----" in text


def die(rank: int, how: str) -> None:
    print(f"last words of {rank}")
    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [("SIGKILL", "signal 9 (SIGKILL)"), ("SIGSEGV", "signal 11 (SIGSEGV)"), ("exit", "exit code 7")],
)
def test_a_dead_rank_tells_signal_or_exit_code(how: str, text: str) -> None:
    report = failure(die, 2, kwargs={"how": how})
    assert report.startswith(f"rank 1 of 2 died first: {text}")
    assert "rank 0 followed: RuntimeError" in report
    assert "---- output of rank 1 ----\nlast words of 1" in report
    assert ("in die" in report) == (how == "SIGSEGV")


def leave(rank: int) -> None:
    sys.exit(3)


def test_sys_exit_is_a_failure() -> None:
    assert "SystemExit: 3" in failure(leave, 1)


def talk(rank: int) -> None:
    print(f"start of {rank} " + "x" * 10_000 + f" end of {rank}")
    subprocess.run(["echo", "a child speaks"], check=True)
    raise ValueError


def test_the_report_ends_with_the_last_4000_characters_of_each_rank() -> None:
    text = failure(talk, 2)
    for rank in range(2):
        output = text.split(f"---- output of rank {rank} ----\n")[1].split("\n----")[0]
        assert f"start of {rank}" not in output
        assert output.endswith(f" end of {rank}\na child speaks")
        assert 3990 <= len(output) <= 4000


def give_up(rank: int, how: str, ranks: list[int]) -> None:
    if rank in ranks:
        getattr(pytest, how)("not today")
    dist.barrier()


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_skip_and_xfail_on_a_rank_reach_the_caller(how: str, ranks: list[int], pool: bool) -> None:
    with pytest.raises(getattr(pytest, how).Exception, match="not today"):
        run_ranks(give_up, 2, kwargs={"how": how, "ranks": ranks}, pool=pool)


def skip_and_fail(rank: int) -> None:
    if rank == 0:
        pytest.skip("not today")
    raise ValueError("a failure outweighs a skip")


def test_a_failure_outweighs_a_skip() -> None:
    assert "a failure outweighs a skip" in failure(skip_and_fail, 2)


def return_a_generator(rank: int) -> Any:
    return (number for number in range(rank))


def test_a_result_that_cannot_be_pickled() -> None:
    text = failure(return_a_generator, 2)
    assert "TypeError: the result of rank" in text
    assert "of type generator, cannot be pickled: cannot pickle 'generator' object. Return plain data" in text


def test_an_argument_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"the argument 'point' of move, of type generator, cannot be pickled"):
        run_ranks(move, 2, kwargs={"point": (number for number in range(2))})


def test_functions_that_no_rank_could_find() -> None:
    for function in (lambda: None, "nowhere.py::f", __file__):
        with pytest.raises(ValueError, match=r"run_ranks: got "):
            run_ranks(function, 2)
    with pytest.raises(ValueError, match=r"world=0"):
        run_ranks(who, 0)


def environment(rank: int, world: int) -> list[object]:
    return [os.environ.get("RANK_TEST"), os.getcwd(), torch.get_num_threads(), torch.rand(1).item()]


@pytest.mark.parametrize("pool", [False, True])
def test_ranks_see_environment_directory_and_seed(
    pool: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("one", "two"):
        monkeypatch.setenv("RANK_TEST", value)
        first, second = run_ranks(environment, 2, pool=pool)
        assert first == second
        assert first[:3] == [value, str(tmp_path), 1]
        assert first[3] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
