"""Linear algebra on batches of matrices against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vescale_dtensor import Shard, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes

linalg = torch.linalg


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _matrices(*batch: int) -> torch.Tensor:
    """Well-conditioned, symmetric and positive definite."""
    x = _values(*batch, 3, 3)
    return x @ x.mT + 3 * torch.eye(3, dtype=torch.float64)


def _factors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return linalg.lu_factor(x)  # type: ignore[no-any-return]


A, B, V, L = _matrices(5), _values(5, 3, 2), _values(5, 3), linalg.cholesky(_matrices(5))
CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "cholesky": (linalg.cholesky, [A]),
    "inv": (linalg.inv, [A]),
    "inverse-method": (lambda x: x.inverse(), [A]),
    "det": (linalg.det, [A]),
    "slogdet": (linalg.slogdet, [A]),
    "eigvalsh": (linalg.eigvalsh, [A]),
    "svdvals": (linalg.svdvals, [B]),
    "qr": (linalg.qr, [B]),
    "qr-r-only": (lambda x: linalg.qr(x, mode="r")[1], [B.mT.contiguous()]),
    "geqrf": (lambda x: torch.geqrf(x.detach()), [B]),
    "lu": (linalg.lu, [A]),
    "matrix_exp": (torch.matrix_exp, [A / 9]),
    "matrix_power": (lambda x: torch.matrix_power(x, 3), [A]),
    "pinv": (linalg.pinv, [A]),
    "cond": (linalg.cond, [A]),
    "solve": (linalg.solve, [A, B]),
    "solve-vectors": (linalg.solve, [A, V]),
    "solve-one-vector": (linalg.solve, [A, _values(3)]),
    "solve-broadcast": (linalg.solve, [A, _values(3, 2)]),
    "solve_triangular": (lambda a, b: linalg.solve_triangular(a, b, upper=False), [L, B]),
    "cholesky_solve": (torch.cholesky_solve, [B, L]),
    "lstsq": (lambda a, b: linalg.lstsq(a, b).solution, [A, B]),
    "householder": (linalg.householder_product, [B, _values(5, 2)]),
    "lu_solve": (lambda a, b: linalg.lu_solve(*_factors(a), b), [A, B]),
    "vander": (linalg.vander, [V]),
    "two-batch-dims": (linalg.inv, [_matrices(2, 5)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", CASES)
def test_batches_of_matrices(name: str) -> None:
    fn, args = CASES[name]
    with implicit_communication("error"):  # five matrices on four ranks: the last rank has none
        codes = ["S0" if a.ndim > 1 and a.shape[0] in (2, 5) else "I" for a in args]
        out = check_op(fn, args, codes, cached_mesh(4), rtol=1e-8, atol=1e-8)
        assert (out if isinstance(out, torch.Tensor) else out[0]).placements == (Shard(0),)
    with implicit_communication("allow"):
        for codes in random_codes(args, 2, seed=len(name), count=4):
            check_op(fn, args, codes, cached_mesh(2, 2), rtol=1e-8, atol=1e-8)


@pytest.mark.ranks(4, pool=True)
def test_parts_that_look_like_other_arguments() -> None:
    # three of five systems of three equations lie on the first rank: there, a matrix has the shape of three vectors
    with implicit_communication("error"):
        for rows in (3, 4):
            check_op(linalg.solve, [A, _values(3, rows)], ["S0 I", "I I"], cached_mesh(2, 2), rtol=1e-8, atol=1e-8)


@pytest.mark.ranks(4, pool=True)
def test_solutions_of_pending_sums_stay_pending() -> None:
    with implicit_communication("error"):
        out = check_op(linalg.solve, [A, B], ["R", "P"], cached_mesh(4))
    assert out.placements[0].is_partial()


@pytest.mark.ranks(4, pool=True)
def test_arguments_by_name_in_any_order() -> None:
    with implicit_communication("allow"):
        check_op(lambda a, b: linalg.solve(B=b, A=a), [A, V], ["S0", "S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_torch_still_judges_the_matrices() -> None:
    from vescale_dtensor import distribute_tensor

    x = distribute_tensor(_values(4, 3, 2), cached_mesh(4), [Shard(0)])
    with implicit_communication("allow"), pytest.raises(RuntimeError, match="square"):
        linalg.inv(x)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(3, 5, 3), (3, 3, 5), (3, 3, 3)], ids=str)
def test_batches_too_small_for_all_ranks(shape: tuple[int, ...]) -> None:
    """A rank without matrices factors one that is made up, which must not be singular."""
    x = _values(*shape)
    for fn in (linalg.lu_factor, linalg.svdvals, lambda x: linalg.qr(x).R, linalg.pinv):
        check_op(fn, [x], ["S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_norms_of_empty_matrices() -> None:
    with implicit_communication("allow"):
        for order in (1, "fro", "nuc"):
            check_op(lambda x, order=order: linalg.matrix_norm(x, order), [_values(5, 0)], ["S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("codes", ["S0", "S1", "P"])
def test_weight_norm_moves_no_weights(dim: int, codes: str) -> None:
    v, g = _values(5, 6), torch.norm_except_dim(_values(5, 6, seed=1), 2, dim)
    with implicit_communication("error"):
        check_op(lambda v: torch.norm_except_dim(v, 2, dim), [v], [codes], cached_mesh(4))
        check_op(lambda v, g: torch._weight_norm(v, g, dim), [v, g], [codes, "I"], cached_mesh(4))
