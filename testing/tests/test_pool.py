"""Pools: ranks that live on between tests, and what makes them go."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from vescale_testing import RankFailure, cached_mesh, ranks, run_ranks


def pid() -> int:
    return os.getpid()


def fail() -> None:
    raise ValueError("no")


def hang(rank: int) -> None:
    time.sleep(600 if rank else 0)


def skip(rank: int, world: int) -> None:
    if rank >= world:
        return
    pytest.skip("all ranks agree")


def turn_grad_off() -> None:
    torch.set_grad_enabled(False)


def change_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def enter_a_mode() -> None:
    torch.device("meta").__enter__()


def destroy_group() -> None:
    dist.destroy_process_group()


def draw() -> tuple[float, float]:
    return torch.rand(1).item(), random.random()


def mesh_and_groups() -> tuple[int, int, int]:
    mesh = cached_mesh(2, 1, names=("a", "b"))
    return id(mesh), mesh.size(0), len(dist.distributed_c10d._world.pg_map)


def test_ranks_live_on_and_sizes_have_pools_of_their_own() -> None:
    two, four = run_ranks(pid, 2, pool=True), run_ranks(pid, 4, pool=True)
    assert run_ranks(pid, 2, pool=True) == two
    assert run_ranks(pid, 4, pool=True) == four
    assert not set(two) & set(four)
    assert run_ranks(pid, 2) != two


@pytest.mark.parametrize("function", [fail, hang])
def test_a_failure_ends_the_pool_and_the_next_test_gets_a_new_one(function: object) -> None:
    before = run_ranks(pid, 2, pool=True)
    with pytest.raises(RankFailure):
        run_ranks(function, 2, timeout=0.3, pool=True)  # type: ignore[arg-type]
    after = run_ranks(pid, 2, pool=True)
    assert not set(before) & set(after)


def test_a_skip_on_all_ranks_keeps_the_pool() -> None:
    before = run_ranks(pid, 2, pool=True)
    with pytest.raises(pytest.skip.Exception, match="all ranks agree"):
        run_ranks(skip, 2, pool=True)
    assert run_ranks(pid, 2, pool=True) == before


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (turn_grad_off, "grad mode enabled: True before, False after"),
        (change_dtype, "default dtype: torch.float32 before, torch.float64 after"),
        (enter_a_mode, "torch function modes: 0 before, 1 after"),
        (destroy_group, "default process group: "),
    ],
)
def test_state_left_behind_fails_the_test_that_left_it(function: object, text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(function, 2, pool=True)  # type: ignore[arg-type]
    assert run_ranks(function, 2) == [None, None]  # type: ignore[arg-type]  # fresh ranks may do as they like


def test_generators_start_alike_in_every_test() -> None:
    first = run_ranks(draw, 2, pool=True)
    assert first == run_ranks(draw, 2, pool=True)
    assert first[0] == first[1]


def test_meshes_are_made_once_per_pool() -> None:
    first = run_ranks(mesh_and_groups, 2, pool=True)
    assert run_ranks(mesh_and_groups, 2, pool=True) == first


def test_a_pool_with_too_many_groups_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_ranks(pid, 2, pool=True)
    monkeypatch.setattr(ranks, "MAX_GROUPS", 0)
    run_ranks(pid, 2, pool=True)
    assert run_ranks(pid, 2, pool=True) != before


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("number", range(20))
def test_the_marker_with_a_pool(rank: int, world: int, number: int) -> None:
    total = torch.tensor(float(rank * number))
    dist.all_reduce(total)
    assert total.item() == 6.0 * number
