"""Sorting, selection, counting and scans against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, compare, placements, random_codes

ONE: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: x.sort(0, descending=True),
    "sort-stable": lambda x: torch.sort(x, dim=1, stable=True),
    "sort-last": lambda x: torch.sort(x),
    "argsort": lambda x: x.argsort(1),
    "msort": lambda x: torch.msort(x),
    "topk": lambda x: x.topk(1, 1),
    "topk-smallest": lambda x: torch.topk(x, 2, dim=0, largest=False),
    "kthvalue": lambda x: torch.kthvalue(x, 2, 0),
    "kthvalue-keepdim": lambda x: x.kthvalue(1, dim=-1, keepdim=True),
    "median": lambda x: x.median(),
    "median-dim": lambda x: torch.median(x, 0, keepdim=True),
    "nanmedian": lambda x: torch.nanmedian(x, dim=-1),
    "mode": lambda x: x.round().mode(0),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=0),
    "quantile-full": lambda x: x.quantile(0.7),
    "quantile-keepdim": lambda x: torch.nanquantile(x, 0.5, 1, True, interpolation="lower"),
    "cumsum": lambda x: x.cumsum(0),
    "cumsum-last": lambda x: torch.cumsum(x, dim=-1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: torch.cummax(x, 0),
    "cummin": lambda x: x.cummin(2),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "diff": lambda x: torch.diff(x, dim=0),
    "diff-n": lambda x: x.diff(n=2),
    "unique": lambda x: torch.unique((x.detach() * 2).round()),
    "bincount": lambda x: torch.bincount((x[0, 0].abs() * 3).long(), minlength=9),
    "histc": lambda x: torch.histc(x.detach(), 5, -1, 1),
    "histc-range": lambda x: torch.histc(x.detach(), bins=4),
    "int-cumsum": lambda x: (x > 0).cumsum(0),
    "cumsum-in-place": lambda x: (x * 1).cumsum_(1),
}

FREE = (
    """sort argsort topk kthvalue-keepdim median-dim nanmedian cumsum cumprod cummax diff quantile histc mode""".split()
)

TWO: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "searchsorted": (lambda s, v: torch.searchsorted(s.sort().values, v), [(6,), (4, 5)]),
    "searchsorted-rows": (lambda s, v: torch.searchsorted(s.sort().values, v, right=True), [(3, 6), (3, 5)]),
    "bucketize": (lambda v, s: torch.bucketize(v, s.sort().values), [(4, 5), (6,)]),
    "quantiles": (lambda x, q: torch.quantile(x, q.sigmoid(), dim=0), [(5, 4), (3,)]),
    "diff-prepend": (lambda x, y: torch.diff(x, dim=1, prepend=y), [(5, 4), (5, 2)]),
    "diff-append": (lambda x, y: torch.diff(x, 1, 0, append=y), [(5, 4), (1, 4)]),
}


def data(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", ONE)
def test_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in [(8, 5, 3), (3, 1, 6)]:
        x = data(shape)
        for codes in random_codes([x], len(mesh_shape), seed=len(case), count=10):
            check_op(ONE[case], [x], codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", TWO)
def test_two_operands_equal_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    fn, shapes = TWO[case]
    args = [data(s, i) for i, s in enumerate(shapes)]
    for codes in random_codes(args, len(mesh_shape), seed=len(case), count=20):
        check_op(fn, args, codes, mesh, grad="diff" in case)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", FREE)
def test_other_dims_stay_sharded(case: str) -> None:
    mesh = cached_mesh(4)
    free = {"argsort": "S0", "topk": "S0", "cumprod": "S0"}.get(case, "S1")
    codes = [free, "S0"] if case in ("cumsum", "histc") else [free]
    with implicit_communication("error"):
        for code in codes:
            check_op(ONE[case], [data((8, 5, 3))], [code], mesh)


@pytest.mark.ranks(4, pool=True)
def test_results_keep_their_names() -> None:
    x = distribute_tensor(data((8, 5)), cached_mesh(4), placements("S1"))
    assert x.sort(0).indices.shape == (8, 5)
    assert x.max(1).values.shape == (8,)
    compare(x.topk(2, dim=0).values, x.full_tensor().topk(2, dim=0).values)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0", "P"])
def test_bounds_may_be_tensors(codes: str) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with implicit_communication("allow"):
        check_op(lambda x: torch.histc(x, 4, x.min(), x.max()), [x], [codes], cached_mesh(4), grad=False)
