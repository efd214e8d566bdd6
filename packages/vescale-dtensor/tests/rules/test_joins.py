"""Cutting, joining, and functions along dims, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Shard, distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements, random_codes

Fn = Callable[..., Any]

CASES: dict[str, tuple[Fn, list[tuple[int, ...]]]] = {
    "split": (lambda x: x.split(2, 0), [(6, 5, 4)]),
    "split-uneven": (lambda x: torch.split(x, 4, dim=0), [(6, 5, 4)]),
    "split-sizes": (lambda x: x.split([1, 3, 1], 1), [(6, 5, 4)]),
    "split-one": (lambda x: x.split(9, -1), [(6, 5, 4)]),
    "split_with_sizes": (lambda x: torch.split_with_sizes(x, [2, 4]), [(6, 5)]),
    "chunk": (lambda x: x.chunk(3, -1), [(6, 5, 4)]),
    "chunk-many": (lambda x: torch.chunk(x, 4, 0), [(6, 5)]),
    "tensor_split": (lambda x: x.tensor_split(4), [(6, 5)]),
    "tensor_split-indices": (lambda x: torch.tensor_split(x, (1, 3), dim=1), [(6, 5)]),
    "unbind": (lambda x: x.unbind(1), [(6, 3, 4)]),
    "unbind-0": (lambda x: torch.unbind(x), [(3, 4)]),
    "hsplit": (lambda x: x.hsplit(2), [(6, 4)]),
    "hsplit-flat": (lambda x: torch.hsplit(x, (1, 4)), [(6,)]),
    "vsplit": (lambda x: torch.vsplit(x, 3), [(6, 4)]),
    "dsplit": (lambda x: torch.dsplit(x, [1, 2]), [(3, 2, 4)]),
    "qkv": (lambda x: [p * i for i, p in enumerate(x.chunk(3, -1))], [(2, 4, 12)]),
    "cat": (lambda *t: torch.cat(t, 1), [(6, 5, 4), (6, 2, 4)]),
    "cat-negative": (lambda *t: torch.cat(t, dim=-1), [(6, 2), (6, 3), (6, 1)]),
    "cat-legacy-empty": (lambda *t: torch.cat(t, -2), [(0,), (2, 3, 4)]),
    "concat": (lambda *t: torch.concat(t), [(4, 3), (2, 3)]),
    "stack": (lambda *t: torch.stack(t), [(4, 3), (4, 3)]),
    "stack-last": (lambda *t: torch.stack(t, -1), [(4, 3), (4, 3)]),
    "hstack": (lambda *t: torch.hstack(t), [(4, 3), (4, 2)]),
    "hstack-flat": (lambda *t: torch.hstack(t), [(4,), (3,)]),
    "vstack": (lambda *t: torch.vstack(t), [(4,), (2, 4)]),
    "dstack": (lambda *t: torch.dstack(t), [(2, 4), (2, 4, 3)]),
    "column_stack": (lambda *t: torch.column_stack(t), [(4,), (4, 2)]),
    "atleast_3d": (lambda x: torch.atleast_3d(x), [(5, 4)]),
    "atleast_2d": (lambda *t: torch.atleast_2d(*t), [(5,), (2, 3)]),
    "flip": (lambda x: x.flip(0, 2), [(6, 5, 4)]),
    "flip-list": (lambda x: torch.flip(x, [1]), [(6, 5)]),
    "fliplr": (lambda x: torch.fliplr(x), [(6, 5)]),
    "flipud": (lambda x: x.flipud(), [(6, 5)]),
    "rot90": (lambda x: torch.rot90(x, 1, (0, 2)), [(6, 5, 4)]),
    "roll": (lambda x: x.roll(2, 1), [(6, 5)]),
    "roll-flat": (lambda x: torch.roll(x, 3), [(6, 5)]),
    "roll-two": (lambda x: torch.roll(x, (1, 2), (0, 1)), [(6, 5, 4)]),
    "repeat": (lambda x: x.repeat(2, 1, 3), [(6, 5)]),
    "repeat-size": (lambda x: x.repeat((1, 2)), [(6, 5)]),
    "tile": (lambda x: x.tile((2,)), [(6, 5)]),
    "tile-more": (lambda x: torch.tile(x, (2, 1, 1)), [(6, 5)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), [(2, 4, 3)]),
    "repeat_interleave-uneven": (lambda x: torch.repeat_interleave(x, 3, dim=0), [(5, 3)]),
    "repeat_interleave-flat": (lambda x: x.repeat_interleave(2), [(5, 3)]),
    "tril": (lambda x: x.tril(), [(6, 5)]),
    "triu": (lambda x: torch.triu(x, 1), [(3, 6, 5)]),
    "triu-far": (lambda x: torch.triu(x, diagonal=-2), [(6, 7)]),
    "tril_": (lambda x: (x * 1).tril_(1), [(6, 7)]),
    "pad": (lambda x: F.pad(x, (1, 2)), [(6, 5)]),
    "pad-value": (lambda x: F.pad(x, (0, 1), value=3.0), [(6, 5)]),
    "pad-crop": (lambda x: F.pad(x, (-1, 0, 2, 0)), [(6, 5)]),
    "pad-reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), [(4, 3, 5)]),
    "constant_pad_nd": (lambda x: torch.constant_pad_nd(x, [0, 1], 2.0), [(6, 5)]),
    "diagonal": (lambda x: x.diagonal(), [(6, 5)]),
    "diagonal-dims": (lambda x: torch.diagonal(x, 1, 0, 2), [(4, 5, 6)]),
    "unfold": (lambda x: x.unfold(1, 3, 2), [(4, 7, 2)]),
}  # fmt: skip


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes = CASES[case]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    mesh = cached_mesh(*mesh_shape)
    for codes in random_codes(args, len(mesh_shape), seed=len(case), count=14):
        check_op(fn, args, codes, mesh)


FREE: dict[str, tuple[Fn, list[tuple[int, ...]], list[str], str]] = {
    "cat": (lambda *t: torch.cat(t, 1), [(6, 5), (6, 2)], ["S0", "S0"], "S0"),
    "cat-pending": (lambda *t: torch.cat(t, 1), [(6, 5), (6, 2)], ["P", "P"], "P"),
    "cat-cache": (lambda *t: torch.cat(t, -2), [(0,), (2, 8, 3, 4)], ["I", "S1"], "S1"),
    "stack": (lambda *t: torch.stack(t, 0), [(6, 5), (6, 5)], ["S1", "S1"], "S2"),
    "split": (lambda x: x.split(2, 1)[1], [(6, 4)], ["S0"], "S0"),
    "split-aligned": (lambda x: x.split(8, 0)[0], [(8, 4)], ["S0"], "S0"),
    "tril": (lambda x: x.tril(), [(6, 6)], ["S1"], "S1"),
    "heads": (lambda x: x.repeat_interleave(2, 1), [(2, 4, 3)], ["S1"], "S1"),
    "pad": (lambda x: F.pad(x, (0, 1), value=-100), [(6, 4)], ["S0"], "S0"),
    "roll": (lambda x: x.roll(1, 1), [(6, 4)], ["S0"], "S0"),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", FREE)
def test_keeps_its_shards(case: str) -> None:
    fn, shapes, codes, wanted = FREE[case]
    mesh = cached_mesh(4)
    args = [torch.randn(s, dtype=torch.float64) for s in shapes]
    with implicit_communication("error"):
        y = fn(*[distribute_tensor(a, mesh, placements(c)) for a, c in zip(args, codes, strict=True)])
    assert list(y.placements) == placements(wanted)


@pytest.mark.ranks(4, pool=True)
def test_split_of_a_sharded_dim_stays_sharded() -> None:
    x = torch.arange(48, dtype=torch.float64).reshape(4, 12)
    ours = distribute_tensor(x, cached_mesh(4), [Shard(1)])
    with implicit_communication("allow"):
        pieces = ours.chunk(3, -1)
    assert [p.placements for p in pieces] == [(Shard(1),)] * 3
    for mine, theirs in zip(pieces, x.chunk(3, -1), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.ranks(4, pool=True)
def test_writes_through_pieces_reach_the_base() -> None:
    plain = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    ours = distribute_tensor(plain, cached_mesh(4), [Shard(0)])
    for x in (plain, ours):
        with torch.no_grad():
            x.split(2, 1)[1].mul_(3)
            x.chunk(2, 1)[0].zero_()
            x.unbind(1)[4].add_(1)
    torch.testing.assert_close(ours.full_tensor(), plain)


@pytest.mark.ranks(4, pool=True)
def test_errors_are_those_of_torch() -> None:
    x = distribute_tensor(torch.zeros(4, 6), cached_mesh(4), [Shard(0)])
    with pytest.raises(RuntimeError, match="sum exactly to 6"):
        x.split([2, 3], 1)
    with pytest.raises(RuntimeError, match="greater than 0"):
        x.chunk(0)
    with pytest.raises(RuntimeError, match="not divisible"):
        x.hsplit(4)
    with pytest.raises(RuntimeError, match="repeat"):
        x.repeat(2)
    with implicit_communication("allow"), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([x, x[:, 1:]], 0)
