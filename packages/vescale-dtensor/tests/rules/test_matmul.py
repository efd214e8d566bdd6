"""Products against one device, under every placement of their operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_dtensor import UnsupportedOperationError, distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements, random_codes

CASES = {
    "mm": (torch.mm, [(8, 6), (6, 5)]),
    "matmul-batched": (torch.matmul, [(4, 3, 5), (4, 5, 6)]),
    "matmul-broadcast": (torch.matmul, [(2, 1, 3, 5), (4, 5, 6)]),
    "matmul-vector": (torch.matmul, [(5,), (4, 5, 6)]),
    "mv": (torch.mv, [(7, 5), (5,)]),
    "dot": (torch.dot, [(9,), (9,)]),
    "bmm": (torch.bmm, [(4, 3, 5), (4, 5, 6)]),
    "rmatmul": (lambda x, y: y.__rmatmul__(x), [(3, 5), (5, 4)]),
    "linear": (F.linear, [(3, 4, 6), (8, 6)]),
    "linear-bias": (F.linear, [(3, 4, 6), (8, 6), (8,)]),
    "addmm": (torch.addmm, [(5,), (8, 6), (6, 5)]),
    "baddbmm": (torch.baddbmm, [(4, 3, 6), (4, 3, 5), (4, 5, 6)]),
    "addr": (torch.addr, [(3, 4), (3,), (4,)]),
    "outer": (torch.outer, [(5,), (7,)]),
    "einsum-contract": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [(4, 3, 5), (4, 5, 6)]),
    "einsum-ellipsis": (lambda x, y: torch.einsum("...ij,...jk->...ik", x, y), [(2, 3, 5), (4, 2, 5, 6)]),
    "einsum-three": (lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), [(4, 3), (3, 5), (5, 6)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_product_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes = CASES[case]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    for codes in random_codes(args, len(mesh_shape), seed=len(case), count=40):
        check_op(fn, args, codes, mesh)


@pytest.mark.ranks(4, pool=True)
def test_shapes_that_do_not_fit_raise_the_error_of_torch_before_anything_is_sent() -> None:
    mesh = cached_mesh(4)
    x, w = (distribute_tensor(torch.ones(s), mesh, placements("S0")) for s in ((8, 6), (5, 4)))
    with implicit_communication("error"):
        for product in (torch.matmul, torch.mm, F.linear):
            with pytest.raises(RuntimeError, match=r"mat1 and mat2|must have same reduction dim|shapes cannot be"):
                product(x, w)


@pytest.mark.ranks(4, pool=True, timeout=120)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_matmul_of_any_shapes_and_placements(data: st.DataObject) -> None:
    size = st.integers(1, 6)
    batch = data.draw(st.lists(size, max_size=2))
    m, k, n = data.draw(size), data.draw(size), data.draw(size)
    left = [*batch[data.draw(st.integers(0, len(batch))) :], m, k]
    right = [*(1 if data.draw(st.booleans()) else b for b in batch), k, n]
    args = [
        torch.randn(s, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i, s in enumerate((left, right))
    ]
    check_op(torch.matmul, args, [data.draw(_codes(a.ndim)) for a in args], cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_a_product_that_would_resize_its_first_argument() -> None:
    """torch's `addbmm_` gives a scalar the shape of the product; a DTensor keeps its shape."""
    mesh = cached_mesh(4)
    x, left, right = (distribute_tensor(torch.ones(s), mesh) for s in ((), (3, 5, 2), (3, 2, 4)))
    with pytest.raises(UnsupportedOperationError, match="cannot change in place"):
        x.addbmm_(left, right)
    assert x.addbmm(left, right).shape == (5, 4)


def _codes(ndim: int) -> st.SearchStrategy[str]:
    return st.tuples(*[st.sampled_from([*(f"S{d}" for d in range(ndim)), "I", "R", "P"])] * 2).map(" ".join)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("added", [(1,), (), (5,)], ids=str)
def test_rows_are_too_few_for_all_ranks(added: tuple[int, ...]) -> None:
    """torch gives no rows the shape of what is added."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (added, (5, 3), (3,))]
    with implicit_communication("allow"):
        check_op(torch.addmv, values, ["I", "S0", "I"], cached_mesh(4))
