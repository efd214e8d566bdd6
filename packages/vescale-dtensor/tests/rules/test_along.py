"""Functions that act along some dims, sharded along the others, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import implicit_communication, plain_tensors
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _unpool(x: torch.Tensor) -> torch.Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


X, Y = _values(5, 3, 4), _values(5, 3, 4)
CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "glu": (F.glu, [X]),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), [X]),
    "diag_embed": (torch.diag_embed, [X]),
    "diag_embed-dims": (lambda x: torch.diag_embed(x, 1, 0, 2), [X]),
    "view_as_real": (lambda x: torch.view_as_real(torch.complex(x, x)), [X]),
    "view_as_complex": (torch.view_as_complex, [_values(5, 3, 2)]),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 2, 1, 3), [X, _values(5, 3, 2)]),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 1, 2), [X, _values(5, 4)]),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y, 0, 1, 2), [X, _values(5, 3)]),
    "max_unpool2d": (_unpool, [_values(5, 2, 4, 4)]),
    "cross": (torch.linalg.cross, [_values(5, 4, 3), _values(5, 4, 3)]),
    "cross-broadcast": (torch.linalg.cross, [_values(5, 4, 3), _values(1, 4, 3)]),
    "cross-first-of-three": (torch.cross, [X, Y]),
    "trapezoid": (torch.trapezoid, [X]),
    "trapezoid-points": (lambda y, x: torch.trapezoid(y, x), [X, Y]),
    "trapezoid-one-x": (lambda y, x: torch.trapezoid(y, x, dim=1), [X, _values(3)]),
    "cumulative_trapezoid": (lambda y: torch.cumulative_trapezoid(y, dx=0.5, dim=2), [X]),
    "gradient": (lambda x: torch.gradient(x, dim=2), [X]),
    "gradient-dims": (lambda x: torch.gradient(x, spacing=0.5, dim=(1, 2), edge_order=2), [X]),
    "isin": (lambda x, y: torch.isin(x, y[0, 0]), [X.round(), Y.round()]),
    "cov": (lambda x: torch.cov(x), [_values(3, 5)]),
    "cov-weights": (
        lambda x: torch.cov(
            x, correction=0, fweights=torch.tensor([1, 2, 1, 1, 3]), aweights=torch.tensor([0.5, 1, 2, 1, 1]).double()
        ),
        [_values(3, 5)],
    ),
    "cov-importance": (lambda x: torch.cov(x, aweights=torch.arange(1.0, 6).double()), [_values(3, 5)]),
    "corrcoef": (torch.corrcoef, [_values(3, 5)]),
    "corrcoef-vector": (torch.corrcoef, [_values(5)]),
    "native_group_norm": (
        lambda x, w, b: torch.native_group_norm(x, w, b, 5, 4, 3, 2, 1e-5),
        [_values(5, 4, 3), _values(4), _values(4)],
    ),
    "pad-reflect": (lambda x: F.pad(x, (1, 2), "reflect"), [X]),
    "pad-circular": (lambda x: F.pad(x, (1, 0, 0, 1), "circular"), [_values(5, 1, 3, 2)]),
    "dropout-backward": (
        lambda x, y: torch.ops.aten.native_dropout_backward.default(x.detach(), y.detach() > 0, 2.0),
        [X, Y],
    ),
    "hermite": (lambda x: torch.special.hermite_polynomial_h(x.detach(), 3), [X]),
}
GATHERED = ("isin", "cov", "corrcoef")
"""Which need more than the first dim's own data."""


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", CASES)
def test_function_along_dims(name: str) -> None:
    fn, args = CASES[name]
    with plain_tensors("replicate"):
        if not name.startswith(GATHERED):
            with implicit_communication("error"):  # five rows on four ranks: the last rank has none
                check_op(fn, args, ["S0" if a.shape[0] == 5 else "I" for a in args], cached_mesh(4))
        with implicit_communication("allow"):
            for codes in random_codes(args, 2, seed=len(name), count=5):
                check_op(fn, args, codes, cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_cross_acts_along_the_dim_of_the_whole() -> None:
    with implicit_communication("error"):  # three of five rows lie on the first rank
        check_op(torch.cross, [_values(5, 3), _values(5, 3)], ["S0 I", "S0 I"], cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_observations_of_a_covariance_may_be_sharded() -> None:
    with implicit_communication("error"):
        check_op(torch.cov, [_values(3, 5)], ["S1"], cached_mesh(4))
        check_op(torch.corrcoef, [_values(3, 5)], ["S1"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_take_reads_positions_of_the_whole() -> None:
    index = torch.tensor([[3, -1, 7], [0, 11, 5]])
    with implicit_communication("error"):
        check_op(torch.take, [_values(4, 3), index], ["I", "S1"], cached_mesh(4))
    with implicit_communication("allow"):
        check_op(torch.take, [_values(4, 3), index], ["S0", "S0"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_backward(name: str) -> None:
    grad, out = _values(5, 4), torch.softmax(_values(5, 4), 1)
    backward = getattr(torch, f"_{name}_backward_data")
    with implicit_communication("error"):
        check_op(
            lambda g, y: backward(g.detach(), y.detach(), 1, torch.float64), [grad, out], ["S0", "S0"], cached_mesh(4)
        )
