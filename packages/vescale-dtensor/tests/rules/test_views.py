"""Views against one device: values, gradients, shared memory, and which of them communicate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication
from vescale_dtensor._rules.views import reshape_pairs
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, check_op, placements

Fn = Callable[..., Any]

CASES: dict[str, tuple[Fn, list[tuple[int, ...]]]] = {
    "view-flat": (lambda x: x.view(-1), [(4, 6)]),
    "view-split": (lambda x: x.view(4, 2, 3), [(4, 6)]),
    "view-merge": (lambda x: x.view((-1, 6)), [(2, 4, 6)]),
    "view-merge-uneven": (lambda x: x.view(15, 4), [(5, 3, 4)]),
    "view-split-uneven": (lambda x: x.view(6, 2), [(12,)]),
    "view-regroup": (lambda x: x.view(3, 8), [(6, 4)]),
    "view-ones": (lambda x: x.view(1, 4, 1, 6), [(4, 1, 6)]),
    "view-scalar": (lambda x: x.view(()), [(1, 1)]),
    "reshape": (lambda x: x.reshape(8, -1), [(2, 4, 6)]),
    "reshape-kw": (lambda x: torch.reshape(input=x, shape=(8, 6)), [(2, 4, 6)]),
    "reshape-transposed": (lambda x: x.transpose(0, 1).reshape(4, 12), [(2, 4, 6)]),
    "flatten": (lambda x: x.flatten(), [(4, 6)]),
    "flatten-some": (lambda x: torch.flatten(x, 1, 2), [(4, 3, 2, 2)]),
    "unflatten": (lambda x: x.unflatten(1, (3, -1)), [(4, 6)]),
    "ravel": (lambda x: x.ravel(), [(4, 3)]),
    "transpose": (lambda x: x.transpose(0, -1), [(4, 5, 3)]),
    "transpose-kw": (lambda x: torch.transpose(x, dim0=1, dim1=2), [(4, 5, 3)]),
    "swapaxes": (lambda x: x.swapaxes(0, 1), [(4, 5, 3)]),
    "permute": (lambda x: x.permute(2, 0, 1), [(4, 5, 3)]),
    "permute-list": (lambda x: torch.permute(x, [1, -1, 0]), [(4, 5, 3)]),
    "movedim": (lambda x: x.movedim((0, 1), (2, 0)), [(4, 5, 3)]),
    "moveaxis": (lambda x: torch.moveaxis(x, 0, -1), [(4, 5, 3)]),
    "t": (lambda x: x.t(), [(5, 3)]),
    "T": (lambda x: x.T, [(5, 3)]),
    "mT": (lambda x: x.mT, [(2, 5, 3)]),
    "mH": (lambda x: x.mH, [(2, 5, 3)]),
    "H": (lambda x: x.H, [(5, 3)]),
    "adjoint": (lambda x: x.adjoint(), [(2, 5, 3)]),
    "squeeze": (lambda x: x.squeeze(), [(4, 1, 3, 1)]),
    "squeeze-one": (lambda x: x.squeeze(0), [(4, 1, 3)]),
    "squeeze-dim": (lambda x: x.squeeze(-2), [(4, 1, 3)]),
    "squeeze-dims": (lambda x: torch.squeeze(x, (1, 0)), [(4, 1, 3)]),
    "unsqueeze": (lambda x: x.unsqueeze(1), [(4, 3)]),
    "unsqueeze-last": (lambda x: torch.unsqueeze(x, -1), [(4, 3)]),
    "expand": (lambda x: x.expand(-1, 5, 3), [(4, 1, 3)]),
    "expand-lead": (lambda x: x.expand(2, 4, 3), [(4, 3)]),
    "expand-size": (lambda x: x.expand(torch.Size([2, 4, 3])), [(1, 3)]),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (2, 4, 3)), [(4, 1)]),
    "view_as": (lambda x, y: x.view_as(y), [(4, 6), (4, 2, 3)]),
    "reshape_as": (lambda x, y: x.reshape_as(y), [(4, 6), (24,)]),
    "expand_as": (lambda x, y: x.expand_as(y), [(1, 6), (4, 6)]),
    "broadcast_tensors": (lambda x, y: torch.broadcast_tensors(x, y), [(4, 1), (1, 6)]),
    "aten-view": (lambda x: torch.ops.aten.view(x, [2, 2, 6]), [(4, 6)]),
    "aten-permute": (lambda x: torch.ops.aten.permute.default(x, [1, 0]), [(4, 6)]),
    "transpose_copy": (lambda x: torch.transpose_copy(x, 0, 1), [(4, 6)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_view_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes = CASES[case]
    mesh = cached_mesh(*mesh_shape)
    args = [torch.arange(math.prod(s), dtype=torch.float64).reshape(s) + i for i, s in enumerate(shapes)]
    codes = all_codes(len(shapes[0]), len(mesh_shape), partial=True)
    for i, code in enumerate(codes if len(codes) < 8 else codes[::3]):
        others = [all_codes(len(s), len(mesh_shape))[i % 3] for s in shapes[1:]]
        check_op(fn, args, [code, *others], mesh)


@st.composite
def _regrouped(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equally many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
        cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=3)) | {len(order)})
        shapes.append(tuple(math.prod(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)))
    return shapes[0], shapes[1]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (1, 4)], ids=str)
def test_any_reshape(mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(_regrouped(), st.integers(0, 1000))
    def run(shapes: tuple[tuple[int, ...], tuple[int, ...]], pick: int) -> None:
        old, new = shapes
        codes = all_codes(len(old), len(mesh_shape), partial=True)
        x = torch.arange(math.prod(old), dtype=torch.float64).reshape(old)
        check_op(lambda t: t.view(new), [x], [codes[pick % len(codes)]], mesh)

    run()


@pytest.mark.parametrize(
    ("old", "new", "pairs"),
    [
        ((4, 6), (24,), [(0, 0, 6, 1)]),
        ((24,), (4, 6), [(0, 0, 1, 6)]),
        ((4, 6), (4, 2, 3), [(0, 0, 1, 1), (1, 1, 1, 3)]),
        ((1, 4), (4, 1), [(0, 1, 1, 1), (1, 0, 1, 1)][1:]),
        ((1, 4, 1), (1, 2, 2, 1), [(0, 0, 1, 1), (1, 1, 1, 2), (2, 3, 1, 1)]),
        ((2, 0), (2, 0, 5), [(0, 0, 1, 1), (1, 1, 1, 1)]),
    ],
)
def test_reshape_pairs(old: tuple[int, ...], new: tuple[int, ...], pairs: list[tuple[int, ...]]) -> None:
    assert reshape_pairs(old, new) == pairs


FREE: dict[str, tuple[Fn, tuple[int, ...], str, str]] = {
    "heads": (lambda x: x.view(2, 3, 4, 2), (2, 3, 8), "S2", "S2"),
    "heads-back": (lambda x: x.reshape(2, 3, 8), (2, 3, 4, 2), "S2", "S2"),
    "batch": (lambda x: x.view(-1, 8), (4, 3, 8), "S0", "S0"),
    "uneven-batch": (lambda x: x.flatten(0, 1), (7, 2, 8), "S0", "S0"),
    "uneven-back": (lambda x: x.view(7, 2), (14,), "S0", "S0"),
    "pending": (lambda x: x.view(-1), (4, 6), "P", "P"),
    "transpose": (lambda x: x.transpose(0, 1), (4, 6), "S0", "S1"),
    "expand-other": (lambda x: x.expand(4, 3), (4, 1), "S0", "S0"),
    "one": (lambda x: x.view(4, 1), (1, 4), "S1", "S0"),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", FREE)
def test_view_keeps_its_shards(case: str) -> None:
    fn, shape, code, wanted = FREE[case]
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    mesh = cached_mesh(4)
    with implicit_communication("error"):
        y = fn(distribute_tensor(x, mesh, placements(code)))
    assert list(y.placements) == placements(wanted)
    torch.testing.assert_close(y.full_tensor(), fn(x))


@pytest.mark.ranks(4, pool=True)
def test_views_share_memory() -> None:
    mesh = cached_mesh(2, 2)
    for code in ("S0 S1", "S0 I", "R S0", "I I", "S1 S1"):
        base = torch.arange(48, dtype=torch.float64).reshape(8, 6)
        ours = distribute_tensor(base, mesh, placements(code))
        for x in (base, ours):
            x.t().add_(1)
            x[:, None].mul_(2)
            x.unsqueeze(0).squeeze(0).sub_(3)
            x.permute(1, 0).transpose(0, 1).mul_(x.mT.mT)
            x.T[...].add_(1)
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), base)


@pytest.mark.ranks(4, pool=True)
def test_copy_forms_do_not_share_memory() -> None:
    x = distribute_tensor(torch.ones(4, 1, 6), cached_mesh(2, 2), placements("S0 S2"))
    copies = [
        torch.view_copy(x, (4, 6)),
        torch.squeeze_copy(x),
        torch.expand_copy(x, (4, 2, 6)),
        torch.permute_copy(x, (0, 2, 1)),
        torch.narrow_copy(x, 1, 0, 1),
        torch.select_copy(x, 1, 0),
        torch.unbind_copy(x, 1)[0],
        torch.split_copy(x, 1, 1)[0],
        torch.transpose_copy(x, 0, 1),
        torch.slice_copy(x, 0, 0, 4),
    ]
    for copy in copies:
        copy.zero_()
    assert x.full_tensor().all()


@pytest.mark.ranks(4, pool=True)
def test_in_place_through_views_has_gradients() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.view(8, 2, 3).mul_(3)
        y[:, :3].add_(1)
        y.t()[1].pow_(2)
        return y.sum()

    x = torch.arange(48, dtype=torch.float64).reshape(8, 6)
    for code in ("S0", "I", "R"):
        check_op(program, [x], [code], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_write_that_would_be_lost_is_refused() -> None:
    x = distribute_tensor(torch.zeros(3, 4), cached_mesh(4), [Shard(1)])
    with implicit_communication("allow"):
        y = x.view(2, 6)
        with pytest.raises(UnsupportedOperationError, match="would not reach"):
            y.add_(1)
        with pytest.raises(UnsupportedOperationError, match="would not reach"):
            y[1:].mul_(2)
        y.clone().add_(1)


@pytest.mark.ranks(4, pool=True)
def test_view_errors() -> None:
    x = distribute_tensor(torch.zeros(4, 6), cached_mesh(4), [Shard(0)])
    with pytest.raises(RuntimeError, match="is invalid for input of size 24"):
        x.view(5, 5)
    with pytest.raises(RuntimeError, match="only one dimension"):
        x.view(-1, -1)
    with pytest.raises(RuntimeError, match="compatible"):
        x.redistribute([Replicate()]).t().view(24)
    with pytest.raises(IndexError, match="out of range"):
        x.transpose(0, 2)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        x.expand(5, 6)
    with pytest.raises(RuntimeError, match="number of dimensions"):
        x.permute(0)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex128], ids=str)
def test_view_of_bits(dtype: torch.dtype) -> None:
    x = torch.arange(32, dtype=torch.float64).reshape(4, 8)
    for code in ("S0", "S1", "I", "P"):
        with implicit_communication("allow"):
            check_op(lambda t: t.view(dtype), [x], [code], cached_mesh(4), grad=False)


@pytest.mark.ranks(4, pool=True)
def test_in_place_metadata() -> None:
    mesh = cached_mesh(2, 2)
    for code in ("S0 S2", "S2 I", "P R", "S0 S0"):
        plain = torch.arange(24, dtype=torch.float64).reshape(4, 1, 6)
        ours = distribute_tensor(plain, mesh, placements(code))
        for x in (plain, ours):
            x.transpose_(0, 2)
            x.squeeze_()
            x.t_()
            x.unsqueeze_(-1)
            x.swapaxes_(0, 1)
            x.squeeze_(2)
        assert isinstance(ours, DTensor)
        assert ours.shape == plain.shape
        assert tuple(ours.to_local().shape) == tuple(ours.local_shape)
        torch.testing.assert_close((ours * 1).full_tensor(), plain)


@pytest.mark.ranks(4, pool=True)
def test_functions_on_memory() -> None:
    mesh = cached_mesh(4)
    x = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    check_op(lambda t: t.as_strided((2, 3), (6, 2), 1), [x], ["I"], mesh)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    for write in (
        lambda t: t.as_strided((2,), (1,)), lambda t: t.resize_(2, 2), lambda t: t.as_strided_((2,), (1,)),
        lambda t: x.set_(t), lambda t: t.set_(x),
    ):  # fmt: skip
        with pytest.raises(UnsupportedOperationError):
            write(sharded)
    whole = distribute_tensor(x, mesh, [Replicate()])
    assert whole.resize_(2, 5).shape == (2, 5) == tuple(whole.to_local().shape)


@pytest.mark.ranks(4, pool=True)
def test_empty_tensors() -> None:
    mesh = cached_mesh(4)
    for code in ("S0", "S1", "I"):
        check_op(lambda t: t.view(0, 6), [torch.zeros(0, 2, 3, dtype=torch.float64)], [code], mesh)
        check_op(lambda t: t.reshape(2, 0, 1), [torch.zeros(2, 0, dtype=torch.float64)], [code], mesh)
