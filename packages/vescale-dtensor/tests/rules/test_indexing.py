"""Indexing against one device: reading, assigning, gathering and scattering by positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_dtensor import Replicate, Shard, distribute_tensor, implicit_communication
from vescale_dtensor.errors import ImplicitCommunicationError, PlainTensorError, UnsupportedOperationError
from vescale_dtensor.placements import InterleavedShard
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements, random_codes

Fn = Callable[..., Any]
SHAPE = (6, 5, 4)

READS: dict[str, Fn] = {
    "int": lambda x: x[1],
    "int-last": lambda x: x[..., -1],
    "ints": lambda x: x[1, 2, 3],
    "slice": lambda x: x[:3],
    "slice-middle": lambda x: x[1:5, :, 1:],
    "shift-left": lambda x: x[1:],
    "shift-right": lambda x: x[..., :-1, :],
    "full": lambda x: x[:, :, :],
    "ellipsis": lambda x: x[...],
    "step": lambda x: x[::2, 1::3],
    "empty": lambda x: x[3:3],
    "beyond": lambda x: x[4:100],
    "none": lambda x: x[None, :, None, 2],
    "mixed": lambda x: x[1:4, None, ..., 0],
    "true": lambda x: x[True],
    "false": lambda x: x[False],
    "true-after": lambda x: x[0, True],
    "list": lambda x: x[[0, 2, 5]],
    "list-negative": lambda x: x[:, [-1, 0]],
    "two-lists": lambda x: x[[0, 1], [2, 3]],
    "apart": lambda x: x[[0, 1], :, [2, 3]],
    "lists-then-none": lambda x: x[[0, 1], [2, 3], :, None],
    "lists-for-all-then-none": lambda x: x[[0, 1], [2, 3], [1, 1], None],
    "list-and-int": lambda x: x[2, :, [1, 3]],
    "list-and-slice": lambda x: x[1:4, [0, 3]],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "narrow-negative": lambda x: torch.narrow(x, 0, -4, 3),
    "select": lambda x: x.select(1, -2),
    "aten-slice": lambda x: torch.ops.aten.slice.Tensor(x, 0, 1, 4),
    "loop": lambda x: torch.stack([row * i for i, row in enumerate(x)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", READS)
def test_read_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    every = [["S0"], ["S1"], ["S2"], ["I"], ["R"], ["P"]]
    codes = every if len(mesh_shape) == 1 else random_codes([x], 2, seed=3, count=12)
    for code in codes:
        check_op(READS[case], [x], code, mesh)


TENSORS: dict[str, tuple[Fn, list[Any]]] = {
    "rows": (lambda x, i: x[i], [(3,)]),
    "grid": (lambda x, i: x[:, i], [(2, 3)]),
    "pair": (lambda x, i, j: x[i, j], [(4,), (4,)]),
    "pair-apart": (lambda x, i, j: x[i, :, j % 4], [(4,), (4,)]),
    "pair-broadcast": (lambda x, i, j: x[i, j], [(4, 1), (3,)]),
    "with-slice": (lambda x, i: x[1:5, i], [(3,)]),
    "with-int": (lambda x, i: x[1, i], [(3,)]),
    "index_select": (lambda x, i: x.index_select(1, i), [(3,)]),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), [(6, 3, 1)]),
    "gather": (lambda x, i: x.gather(1, i), [(6, 3, 4)]),
    "gather-smaller": (lambda x, i: torch.gather(x, dim=1, index=i), [(4, 8, 2)]),
    "take": (lambda x, i: torch.take(x, i), [(3,)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", TENSORS)
def test_read_by_positions(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes = TENSORS[case]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    indices = [torch.randint(0, 5, s, generator=generator) for s in shapes]
    for codes in random_codes([x, *indices], len(mesh_shape), seed=5, count=16):
        check_op(fn, [x, *indices], codes, mesh)
        check_op(fn, [x > 0, *indices], codes, mesh, grad=False) if "P" not in codes[0] else None


@pytest.mark.ranks(4, pool=True)
def test_masks() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks = {"all": x > 0, "rows": x[:, 0, 0] > 0, "two": x[:, :, 0] > 0}
    for mesh_shape in ((4,), (2, 2)):
        for mask in masks.values():
            for codes in random_codes([x, mask], len(mesh_shape), seed=2, count=6):
                check_op(lambda x, m: x[m], [x, mask], codes, cached_mesh(*mesh_shape))
                check_op(
                    lambda x, m: torch.masked_select(x, m) if m.ndim == 3 else x[m, 1:],
                    [x, mask],
                    codes,
                    cached_mesh(*mesh_shape),
                )


def _assigned(write: Callable[..., None]) -> Fn:
    def program(x: Tensor, *rest: Tensor) -> Tensor:
        y = x * 1
        write(y, *rest)
        return y

    return program


def _set(index: Any) -> Callable[[Tensor, Tensor], None]:
    def write(y: Tensor, v: Tensor) -> None:
        y[index] = v

    return write


def _number(index: Any) -> Callable[[Tensor], None]:
    def write(y: Tensor) -> None:
        y[index] = 2.5

    return write


_ = slice(None)
WRITES: dict[str, tuple[Callable[..., None], list[tuple[int, ...]]]] = {
    "int": (_set(1), [(5, 4)]),
    "int-broadcast": (_set(1), [(4,)]),
    "slice": (_set(slice(1, 4)), [(3, 5, 4)]),
    "slice-broadcast": (_set(slice(1, 4)), [(3, 1, 4)]),
    "step": (_set((slice(None, None, 2), 1)), [(3, 4)]),
    "full": (_set(_), [(6, 5, 4)]),
    "column": (_set((_, 2)), [(6, 4)]),
    "deep": (_set((1, slice(1, 3), 2)), [(2,)]),
    "none": (_set((None, slice(0, 2), None, 3)), [(1, 2, 1, 4)]),
    "leading-ones": (_set((1, 2)), [(1, 1, 4)]),
    "scalar-tensor": (_set((slice(2, 5), _, 1)), [()]),
    "empty": (_set(slice(2, 2)), [(5, 4)]),
    "list": (_set([0, 2]), [(2, 5, 4)]),
    "list-inner": (_set((_, [0, 2])), [(6, 2, 4)]),
    "list-and-slice": (_set((slice(1, 3), [0, 2])), [(2, 1, 4)]),
    "number-int": (_number(1), []),
    "number-slice": (_number((slice(1, 4), ..., slice(1, 3))), []),
    "number-list": (_number([1, 3]), []),
    "number-false": (_number(False), []),
    "number-true": (_number(True), []),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", WRITES)
def test_assignment_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    write, shapes = WRITES[case]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(1)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (SHAPE, *shapes)]
    for codes in random_codes(args, len(mesh_shape), seed=5, count=16):
        check_op(_assigned(write), args, codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_assignment_by_masks_and_positions(mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    rows, where = torch.tensor([4, 0, 2]), x[:, :, 0] > 0
    v = torch.randn((3, 5, 4), generator=generator, dtype=torch.float64)

    def by_rows(y: Tensor, i: Tensor, v: Tensor) -> None:
        y[i] = v

    def by_mask(y: Tensor, m: Tensor) -> None:
        y[m] = 3

    def by_mask_from_tensor(y: Tensor, m: Tensor, v: Tensor) -> None:
        y[m] = v[0, 0]

    def accumulate(y: Tensor, i: Tensor, v: Tensor) -> None:
        y.index_put_((i % 3,), v, accumulate=True)

    for write, rest in (
        (by_rows, [rows, v]),
        (by_mask, [where]),
        (by_mask_from_tensor, [where, v]),
        (accumulate, [rows, v]),
    ):
        for codes in random_codes([x, *rest], len(mesh_shape), seed=8, count=10):
            check_op(_assigned(write), [x, *rest], codes, mesh)


SCATTERS: dict[str, tuple[Fn, list[tuple[int, ...]]]] = {
    "scatter": (lambda x, i, s: x.scatter(1, i, s), [(6, 3, 4), (6, 3, 4)]),
    "scatter-smaller": (lambda x, i, s: x.scatter(1, i, s), [(4, 3, 2), (4, 3, 2)]),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i % 2, s), [(6, 3, 4), (6, 3, 4)]),
    "scatter_add_": (lambda x, i, s: (x * 1).scatter_add_(1, i % 2, s), [(6, 3, 4), (6, 3, 4)]),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(1, i % 2, s, "sum"), [(6, 3, 4), (6, 3, 4)]),
    "scatter_amax": (lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), [(6, 3, 4), (6, 3, 4)]),
    "index_add": (lambda x, i, s: x.index_add(1, i[0, :3, 0] % 2, s, alpha=2), [(6, 3, 4), (6, 3, 4)]),
    "index_add_": (lambda x, i, s: (x * 1).index_add_(1, i[0, :3, 0] % 2, s), [(6, 3, 4), (6, 3, 4)]),
    "index_copy": (lambda x, i, s: x.index_copy(1, i[0, :3, 0], s), [(6, 3, 4), (6, 3, 4)]),
    "index_fill": (lambda x, i, s: x.index_fill(1, i[0, :3, 0], 2.0) * s.sum(), [(6, 3, 4), (6, 3, 4)]),
    "index_fill_": (lambda x, i, s: (x * s.sum()).index_fill_(1, i[0, :3, 0], 2.0), [(6, 3, 4), (6, 3, 4)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", SCATTERS)
def test_scatter_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, (index_shape, source_shape) = SCATTERS[case]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(1)
    x, source = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (SHAPE, source_shape)]
    n = index_shape[1]
    index = torch.stack([torch.randperm(5, generator=generator)[:n] for _ in range(index_shape[0] * index_shape[2])])
    index = index.reshape(index_shape[0], index_shape[2], n).transpose(1, 2).contiguous()
    index = index[:1, :, :1].expand(index_shape).contiguous() if "index" in case else index
    for codes in random_codes([x, index, source], len(mesh_shape), seed=5, count=16):
        check_op(fn, [x, index, source], codes, mesh)


FREE: dict[str, tuple[Fn, str, list[tuple[int, ...]], list[str]]] = {
    "batch-sharded-last": (lambda x: x[:, -1], "S0", [], []),
    "drop-last-row-of-an-uneven-cut": (lambda x: x[:-1], "S0", [], []),
    "rows-of-a-whole-table": (lambda x, i: x[i], "I", [(8,)], ["S0"]),
    "vocabulary-sharded": (lambda x, i: x.gather(2, i), "S2", [(6, 5, 1)], ["I"]),
    "gather-batch": (lambda x, i: x.gather(2, i), "S0", [(6, 5, 1)], ["S0"]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", FREE)
def test_runs_without_implicit_communication(case: str) -> None:
    fn, code, shapes, codes = FREE[case]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((7, *SHAPE[1:]) if "uneven" in case else SHAPE, generator=generator, dtype=torch.float64)
    indices = [torch.randint(0, 4, s, generator=generator) for s in shapes]
    with implicit_communication("error"):
        check_op(fn, [x, *indices], [code, *codes], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_shift_moves_boundaries_only() -> None:
    from vescale_dtensor._comm import record

    x = distribute_tensor(torch.arange(64.0).reshape(16, 4), cached_mesh(4), [Shard(0)])
    events: list[Any] = []
    record.listeners.append(events.append)
    try:
        y = x[1:]
    finally:
        record.listeners.clear()
    assert y.placements == (Shard(0),)
    assert [e.name for e in events] == ["all_to_all"]
    with implicit_communication("error"), pytest.raises(ImplicitCommunicationError, match="cuts a sharded dim"):
        x[1:]


@pytest.mark.ranks(4, pool=True)
def test_writes_through_views_reach_the_base() -> None:
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    for code in ("S0", "I", "R"):
        ours = distribute_tensor(base, cached_mesh(4), placements(code))
        plain = base.clone()
        for x in (plain, ours):
            x[:, :3].mul_(2)
            x[:, 1] += 5
            x[:, 2:4][:, 0] = 7
            x.narrow(1, 4, 2).zero_()
            x.select(1, 0).fill_(3)
        torch.testing.assert_close(ours.full_tensor(), plain)
    ours = distribute_tensor(base, cached_mesh(4), [Shard(0)])
    with implicit_communication("allow"), pytest.raises(UnsupportedOperationError, match="would not reach"):
        ours[0].add_(1)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(("mesh_shape", "code"), [((4,), "S0"), ((2, 2), "S0 S0"), ((2, 2), "S1 S0")], ids=str)
def test_any_slice_of_a_sharded_dim(mesh_shape: tuple[int, ...], code: str) -> None:
    mesh = cached_mesh(*mesh_shape)
    bound = st.none() | st.integers(-14, 14)

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 12), bound, bound, st.integers(1, 4), st.booleans())
    def run(size: int, start: int | None, stop: int | None, step: int, write: bool) -> None:
        x = torch.arange(3.0 * size, dtype=torch.float64).reshape(size, 3)
        index = slice(start, stop, step)
        if write:
            v = torch.randn_like(x[index])
            check_op(_assigned(_set(index)), [x, v], [code, code], mesh)
        else:
            check_op(lambda t: t[index], [x], [code], mesh)

    run()


@pytest.mark.ranks(4, pool=True)
def test_writing_to_a_view_of_a_pending_sum() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 1
        y[0].floor_()
        y[:, 1] = 4
        y[2] += 1
        return y * 2

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for code in ("P", "I", "R", "S1"):
        check_op(program, [x], [code], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_bool_and_int_are_told_apart() -> None:
    x = distribute_tensor(torch.arange(8.0).reshape(2, 4), cached_mesh(4), [Shard(1)])
    assert x[1].shape == (4,)
    assert x[True].shape == (1, 2, 4)
    assert x[0].shape == (4,)
    assert x[False].shape == (0, 2, 4)
    assert x[1, True].shape == (1, 4)
    assert x[torch.tensor(1)].shape == (4,)


@pytest.mark.ranks(4, pool=True)
def test_double_backward_of_a_window() -> None:
    def program(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x[1:] ** 3 * x[:-1]).sum() + (x[2] ** 3).sum(), x, create_graph=True)
        return g * g

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for code in ("S0", "S1", "I"):
        check_op(program, [x], [code], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_index_errors() -> None:
    x = distribute_tensor(torch.zeros(4, 6), cached_mesh(4), [Shard(0)])
    for index, text in (((0, 0, 0), "too many indices"), (4, "out of bounds"), ((..., ...), "single ellipsis")):
        with pytest.raises(IndexError, match=text):
            x[index]
    with pytest.raises(ValueError, match="greater than zero"):
        x[::-1]
    with pytest.raises(PlainTensorError, match="distribute_tensor"):
        x[torch.tensor([0, 1])]
    with pytest.raises(RuntimeError, match="cannot be broadcast"):
        x[0] = distribute_tensor(torch.zeros(5), cached_mesh(4))
    with pytest.raises(UnsupportedOperationError, match="plain tensor"):
        torch.zeros(4, 6)[0] = x[0]
    with pytest.raises(RuntimeError, match="out of range"):
        x[distribute_tensor(torch.tensor([0, 9]), cached_mesh(4))]


@pytest.mark.ranks(4, pool=True)
def test_interleaved_dims_that_no_index_touches_stay_interleaved() -> None:
    mesh, kind = cached_mesh(2, 2), InterleavedShard(1, 2)
    x = torch.arange(4 * 8 * 3, dtype=torch.float64).reshape(4, 8, 3)
    positions = torch.tensor([3, 0, 0, 2])
    whole = x.clone().requires_grad_()
    ours = distribute_tensor(x, mesh, [Replicate(), kind]).requires_grad_()
    index = distribute_tensor(positions, mesh, [Shard(0), Replicate()])
    with implicit_communication("error"):
        taken = ours[index]
        taken.square().sum().backward()
    assert taken.placements == (Shard(0), kind)
    assert torch.equal(taken.full_tensor(), x[positions])
    whole[positions].square().sum().backward()
    assert torch.equal(ours.grad.full_tensor(), whole.grad)
    ours, where = ours.detach(), distribute_tensor(torch.tensor([5, 1]), mesh, [Replicate()] * 2)
    with implicit_communication("allow"):  # the blocks are re-cut to read along them, and to be written to
        assert torch.equal(ours[:, where].full_tensor(), x[:, [5, 1]])
        ours[where % 4] = -1.0
        assert torch.equal(ours.full_tensor(), x.index_fill(0, torch.tensor([1]), -1.0))
