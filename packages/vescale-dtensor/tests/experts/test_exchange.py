"""Rows that travel and come back: values and gradients of any order, uneven and empty, and every dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor._experts.exchange import Traffic, combine, dispatch, exchange, tie
from vescale_dtensor._experts.routes import Residents, routes
from vescale_dtensor._mesh import mesh_info
from vescale_testing import run_threads

WORLD = 4
COUNTS = [[0, 2, 1, 0], [3, 0, 0, 1], [0, 0, 0, 0], [1, 1, 2, 0]]
"""Rows that each rank sends to each."""


def traffic(rank: int) -> Traffic:
    mesh = mesh_info(init_device_mesh("cpu", (WORLD,)))
    return Traffic(mesh, (0,), COUNTS[rank], [COUNTS[r][rank] for r in range(WORLD)])


def rows_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    count = sum(COUNTS[rank])
    return (100 * rank + torch.arange(2 * count)).reshape(count, 2).to(dtype)


def arriving(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    parts = [torch.split(rows_of(r, dtype), COUNTS[r])[rank] for r in range(WORLD)]
    return torch.cat(parts)


def test_rows_arrive_in_order_for_every_dtype() -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64, torch.uint8, torch.bool]

    def body(rank: int) -> None:
        t = traffic(rank)
        for dtype in dtypes:
            got = exchange(rows_of(rank, dtype), t)
            assert got.dtype == dtype
            assert torch.equal(got, arriving(rank, dtype))
            assert torch.equal(exchange(got, t.back()), rows_of(rank, dtype))

    run_threads(WORLD, body)


def test_gradients_of_both_orders() -> None:
    """combine(f(dispatch(x))) with a nonlinear f is a per-row function, whose derivatives are known."""

    def body(rank: int) -> None:
        t = traffic(rank)
        index = torch.arange(sum(t.send)) % 3  # rows are used several times
        x = torch.arange(6, dtype=torch.float64).reshape(3, 2).add(rank).requires_grad_()
        y = combine(dispatch(x, index, t) ** 3, index, t, 3)
        times = torch.bincount(index, minlength=3).unsqueeze(1).to(x.dtype)
        assert torch.equal(y, times * x.detach() ** 3)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.testing.assert_close(grad.detach(), times * 3 * x.detach() ** 2)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, times * 6 * x.detach())

    run_threads(WORLD, body)


def test_a_tied_result_gives_zero_gradients() -> None:
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = tie(torch.zeros(0, 3), a, b)
    assert y.requires_grad
    y.sum().backward()
    assert torch.equal(a.grad, torch.zeros(2, 3))  # type: ignore[arg-type]
    assert torch.equal(b.grad, torch.zeros(4, dtype=torch.float64))  # type: ignore[arg-type]


def test_routes_reach_the_owners_of_all_choices() -> None:
    """Every choice arrives once, at the rank of its expert, beside its token, which travels once per rank."""
    owner, place = [0, 1, 1, 3, 3], [0, 1, 0, 0, 1]
    chosen = [[[0, 1], [2, 1], [3, 4]], [[1, 2]], [], [[3, 3], [4, 0]]]  # the second of rank 3 is one of two ranks'

    def body(rank: int) -> tuple[list[tuple[int, int, int]], int]:
        mesh = mesh_info(init_device_mesh("cpu", (WORLD,)))
        residents = Residents(mesh, (0,), torch.tensor(owner), torch.tensor(place), owner.count(rank))
        mine = torch.tensor(chosen[rank], dtype=torch.int64).reshape(-1, 2)
        way = routes(mine, residents)
        tokens = torch.arange(len(mine)) + 10 * rank  # a token says where it comes from
        slots = torch.arange(mine.numel()) % 2
        rows = dispatch(tokens.double().unsqueeze(1), way.tokens, way.rows).squeeze(1)
        slot = dispatch(slots.double(), way.choices, way.pairs)
        got = zip(rows[way.row_of].tolist(), way.expert_of.tolist(), slot.tolist(), strict=True)
        return [(int(a), b, int(c)) for a, b, c in got], len(rows)

    results = run_threads(WORLD, body)
    for rank, (got, num_rows) in enumerate(results):
        wanted = [
            (10 * r + t, place[e], slot)
            for r in range(WORLD)
            for t, pair in enumerate(chosen[r])
            for slot, e in enumerate(pair)
            if owner[e] == rank
        ]
        assert sorted(got) == sorted(wanted)
        assert num_rows == len({token for token, _, _ in wanted})
