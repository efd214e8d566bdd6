"""Reductions against one device, under every placement, with uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, compare, placements, random_codes

MESHES = [(4,), (2, 2)]
SHAPES = [(8, 5, 3), (3, 1, 6)]

DIFFERENTIABLE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum-dim": lambda x: torch.sum(x, -1),
    "sum-dims": lambda x: x.sum((0, 2), keepdim=True),
    "sum-dtype": lambda x: x.sum(1, dtype=torch.float64),
    "sum-axis": lambda x: x.sum(axis=0, keepdims=True),
    "sum-none": lambda x: torch.sum(x, dim=()),
    "nansum": lambda x: torch.nansum(x, 1),
    "mean": lambda x: x.mean(),
    "mean-dim": lambda x: torch.mean(x, 0),
    "mean-dims": lambda x: x.mean(dim=[0, 2], keepdim=True),
    "mean-last": lambda x: x.mean(-1, keepdim=True),
    "nanmean": lambda x: torch.nanmean(x, 0),
    "nanmean-full": lambda x: torch.nanmean(x),
    "prod": lambda x: x.prod(),
    "prod-dim": lambda x: torch.prod(x, 0, keepdim=True),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "logsumexp-dims": lambda x: x.logsumexp((0, 2), keepdim=True),
    "amax": lambda x: x.amax(0),
    "amin-full": lambda x: torch.amin(x),
    "amax-dims": lambda x: torch.amax(x, (0, 2), keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "max-dim": lambda x: x.max(0),
    "min-dim": lambda x: torch.min(x, dim=2, keepdim=True),
    "aminmax": lambda x: torch.aminmax(x),
    "aminmax-dim": lambda x: torch.aminmax(x, dim=0, keepdim=True),
    "var": lambda x: x.var(),
    "var-dim": lambda x: x.var(0),
    "var-biased": lambda x: torch.var(x, (0, 2), False, True),
    "var-correction": lambda x: torch.var(x, dim=2, correction=2),
    "var-flag": lambda x: x.var(False),
    "std": lambda x: x.std(0, unbiased=False),
    "std-mean": lambda x: torch.std_mean(x, 2),
    "var-mean": lambda x: torch.var_mean(x, dim=(0, 1), correction=0, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm-dim": lambda x: torch.norm(x, 2, 0),
    "norm-1": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "norm-3": lambda x: torch.linalg.vector_norm(x, 3.0, (0, 2), keepdim=True),
    "norm-inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 0),
    "norm-minus-inf": lambda x: torch.linalg.norm(x, -float("inf"), 0),
    "norm-minus-1": lambda x: torch.linalg.vector_norm(x, -1, 0),
    "linalg-norm": lambda x: torch.linalg.norm(x),
    "matrix-fro": lambda x: torch.linalg.matrix_norm(x),
    "matrix-1": lambda x: torch.linalg.matrix_norm(x, 1, dim=(0, 2)),
    "matrix-inf": lambda x: torch.linalg.norm(x, float("inf"), (0, 1), keepdim=True),
    "matrix-nuc": lambda x: torch.linalg.matrix_norm(x, "nuc", dim=(1, 2)),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=0),
    "trace": lambda x: x[:, 0].trace(),
    "trace-flat": lambda x: torch.trace(x.flatten(1)),
    "sum-to-size": lambda x: x.sum_to_size(1, x.shape[2]),
    "square-sum": lambda x: (x.sum(0) ** 2).sum() + x.mean(),
}

EXACT: dict[str, Callable[[Any], Any]] = {
    "any": lambda x: (x > 1).any(),
    "any-dim": lambda x: torch.any(x > 1, 0, keepdim=True),
    "any-dims": lambda x: torch.any(x > 1, dim=(0, 2)),
    "all": lambda x: torch.all(x > -3),
    "all-dim": lambda x: (x > -1).all(0),
    "any-byte": lambda x: (x > 1).to(torch.uint8).any(0),
    "argmax": lambda x: x.argmax(),
    "argmax-dim": lambda x: torch.argmax(x, 0, keepdim=True),
    "argmin": lambda x: torch.argmin(x),
    "argmin-keepdim": lambda x: x.argmin(keepdim=True),
    "argmin-dim": lambda x: x.argmin(dim=2),
    "count": lambda x: torch.count_nonzero(x > 0),
    "count-dim": lambda x: torch.count_nonzero(x > 0, dim=0),
    "bool-sum": lambda x: (x > 0).sum(0),
    "norm-0": lambda x: torch.linalg.vector_norm((x > 0).double(), 0, 0),
    "int-max": lambda x: (x * 10).long().max(0),
    "int-amin": lambda x: (x * 10).long().amin((0, 2)),
    "int-prod": lambda x: (x * 3).int().prod(0),
    "median": lambda x: x.median(),
    "nan-max": lambda x: torch.where(x > 0.5, torch.nan, x).max(0),
    "nan-amax": lambda x: torch.where(x > 1, torch.nan, x).amax(),
    "nan-argmax": lambda x: torch.where(x > 0.5, torch.nan, x).argmax(),
    "nan-min": lambda x: torch.where(x > 0.5, torch.nan, x).min(),
    "inf-max": lambda x: torch.where(x > 0.5, torch.inf, x).max(0),
    "minus-inf": lambda x: torch.full_like(x, -torch.inf).max(0),
    "half-amax": lambda x: x.bfloat16().amax(0),
    "half-var": lambda x: x.half().float().var(0).half(),
}


def data(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_values_and_gradients_equal_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in SHAPES:
        x = data(shape)
        for codes in random_codes([x], len(mesh_shape), seed=len(case), count=12):
            check_op(DIFFERENTIABLE[case], [x], codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [*MESHES, (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_values_equal_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in SHAPES:
        x = data(shape)
        for codes in random_codes([x], len(mesh_shape), seed=len(case), count=8):
            check_op(EXACT[case], [x], codes, mesh, grad=False)


TIED = """amax amin-full amax-dims max min max-dim min-dim aminmax aminmax-dim norm-inf argmax argmin-dim""".split()
DISTRIBUTED = """sum mean-dim amax max-dim argmax any-dim prod-dim var-dim std-mean logsumexp norm-dim norm-inf count
aminmax trace-flat matrix-1""".split()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("case", TIED)
def test_ties_across_ranks_are_shared_or_go_to_the_first(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    fn = {**DIFFERENTIABLE, **EXACT}[case]
    for shape in SHAPES:
        x = data(shape).mul(1.2).round()
        for codes in random_codes([x], len(mesh_shape), seed=1, count=12, partial=False):
            check_op(fn, [x], codes, mesh, grad=case in DIFFERENTIABLE)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", DISTRIBUTED)
def test_sharded_data_never_move(case: str) -> None:
    mesh = cached_mesh(2, 2)
    fn = {**DIFFERENTIABLE, **EXACT}[case]
    x = data((8, 5, 3))
    views = "flatten" if "trace" in case or "matrix" in case else ""
    with implicit_communication("error"):
        for codes in ["S0 S0", "S0 I", "I S0"] if views else ["S0 S1", "S0 S0", "S2 S0", "S1 I"]:
            check_op(fn, [x], [codes], mesh, grad=case in DIFFERENTIABLE)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", ["sum", "mean-dim", "var-dim", "amax", "logsumexp", "norm-dim", "prod-dim"])
def test_second_derivatives(case: str) -> None:
    mesh = cached_mesh(4)
    fn = DIFFERENTIABLE[case]
    x = data((6, 3, 2)).abs() + 0.5

    def penalty(t: Any) -> Any:
        (g,) = torch.autograd.grad((fn(t) ** 3).sum(), t, create_graph=True)
        return (g * g).sum()

    for code in ["S0", "S1", "R", "I"]:
        plain = x.clone().requires_grad_()
        ours = distribute_tensor(x, mesh, placements(code)).requires_grad_()
        (want,) = torch.autograd.grad(penalty(plain), plain)
        (got,) = torch.autograd.grad(penalty(ours), ours)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(4, pool=True)
def test_out_argument_and_two_operand_max() -> None:
    mesh = cached_mesh(4)
    x, y = data((5, 3)), data((5, 3), 1)
    a, b = (distribute_tensor(t, mesh, placements("S0")) for t in (x, y))
    compare(torch.max(a, b), torch.max(x, y))
    compare(a.min(other=b), x.min(other=y))
    out = distribute_tensor(torch.empty(3, dtype=torch.float64), mesh, placements("I"))
    torch.sum(a, 0, out=out)
    compare(out, x.sum(0))
    out = distribute_tensor(torch.empty(5, dtype=torch.float64), mesh, placements("S0"))
    torch.amax(a, 1, out=out)
    compare(out, x.amax(1))


@pytest.mark.ranks(4, pool=True)
def test_torch_judges_wrong_arguments() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(data((5, 3)), mesh, placements("I"))
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(2)
    with pytest.raises(RuntimeError, match="appears multiple times"):
        x.sum((0, 0))
    with pytest.raises(TypeError):
        x.sum("no such dim", 3, 4)
    with pytest.raises((IndexError, RuntimeError), match=r"non-zero size|numel"):
        distribute_tensor(torch.empty(0, 3), mesh, placements("I")).amax(0)
    with pytest.raises(RuntimeError, match="mean"):
        distribute_tensor(torch.arange(4), mesh, placements("S0")).mean()


@pytest.mark.ranks(4, pool=True)
def test_distances() -> None:
    mesh = cached_mesh(2, 2)
    x, y = data((5, 4, 3)), data((5, 6, 3), 1)
    for codes in random_codes([x, y], 2, seed=3, count=30):
        check_op(torch.cdist, [x, y], codes, mesh)
    y = data((5, 4, 3), 1)
    for codes in random_codes([x, y], 2, seed=4, count=20):
        check_op(torch.dist, [x, y], codes, mesh)
        check_op(torch.cosine_similarity, [x, y], codes, mesh)
        check_op(torch.nn.functional.pairwise_distance, [x, y], codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", ["max", "amin", "cumsum", "softmax", "logsumexp"])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3)])
def test_second_gradients_with_empty_shards(name: str, shape: tuple[int, ...]) -> None:
    def program(x: Tensor) -> Tensor:
        result = getattr(torch, name)(x, 0)
        result = result if isinstance(result, Tensor) else result[0]
        (grad,) = torch.autograd.grad(result.sin().sum(), x, create_graph=True)
        return grad.cos() + grad

    x = torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    check_op(program, [x], ["S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_extremes_of_integers_with_empty_shards(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0]).to(dtype)
    check_op(lambda x: (x.amax(), x.amin(), x.max(), x.min(0)[1]), [x], ["S0"], cached_mesh(4))
