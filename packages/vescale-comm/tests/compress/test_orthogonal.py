"""Orthonormal columns, against QR."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._compress.orthogonal import orthonormal, outer


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 99), st.sampled_from([1e-25, 1.0, 1e25]))
def test_columns_span_what_those_of_qr_span(rows: int, columns: int, seed: int, size: float) -> None:
    columns = min(rows, columns)
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = orthonormal((matrix * size).float()).double()
    assert torch.allclose(basis.t() @ basis, torch.eye(columns, dtype=torch.float64), atol=1e-5)
    q, _ = torch.linalg.qr(matrix)
    if torch.linalg.cond(matrix) < 1e3:
        assert torch.allclose(basis @ basis.t(), q @ q.t(), atol=1e-3)


def test_columns_that_tell_nothing_new_become_zero() -> None:
    a, b = torch.randn(50), torch.randn(50)
    basis = orthonormal(torch.stack([a, 3 * a, torch.zeros(50), b, a - 2 * b], dim=1))
    assert [bool(column.any()) for column in basis.unbind(1)] == [True, False, False, True, False]
    assert not orthonormal(torch.zeros(5, 2)).any()
    assert orthonormal(torch.zeros(0, 2)).shape == (0, 2)


def test_one_number_that_is_not_finite_is_not_swallowed() -> None:
    for bad in (float("nan"), float("inf")):
        matrix = torch.randn(9, 3)
        matrix[4, 1] = bad
        basis = orthonormal(matrix)
        assert bool(basis[:, 0].isfinite().all())
        assert bool(basis[:, 1:].isnan().all())


def test_the_product_of_factors() -> None:
    left, right = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    assert torch.allclose(outer(left, right), left @ right.t(), atol=1e-14)


def test_bits_do_not_depend_on_threads() -> None:
    matrix = torch.randn(100_003, 3)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            basis = orthonormal(matrix)
            found.append((basis, outer(basis[:3000], basis[:100])))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_long_columns_are_orthonormal_to_rounding() -> None:
    matrix = torch.randn(300_000, 2, dtype=torch.float64)
    matrix[:, 1] = matrix[:, 0] + 1e-3 * matrix[:, 1]
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        basis = orthonormal(matrix.to(dtype)).double()
        assert (basis.t() @ basis - torch.eye(2)).abs().max() < error
