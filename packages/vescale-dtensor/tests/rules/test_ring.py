"""Attention over a sharded sequence: blocks of keys go round, nothing is gathered, the result is one device's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_dtensor import Shard, distribute_tensor, explain, implicit_communication, parallelize_module
from vescale_dtensor._rules._ring import dealt
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements

sdpa = F.scaled_dot_product_attention


def _qkv(length: int = 10, keys: int = 10, heads: int = 2, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 4), (2, kv_heads, keys, 4), (2, kv_heads, keys, 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _mask(rows: int, kind: str) -> torch.Tensor:
    values = torch.randn(2, 1, rows, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = values < 0.5
    seen[:, :, 0] = rows == 1  # a row that sees nothing
    return seen if kind == "bool" else values


NAMES = """
plain causal causal-even few-queries few-keys cross cross-grouped grouped one-kv-head mask float-mask mask-of-one-row
""".split()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (_qkv(), {}),
        (_qkv(), {"is_causal": True}),
        (_qkv(16, 16), {"is_causal": True, "scale": 0.3}),
        (_qkv(3, 10), {"is_causal": True}),
        (_qkv(10, 3), {"is_causal": True}),
        (_qkv(5, 2), {}),
        (_qkv(5, 2, heads=4), {"enable_gqa": True}),
        (_qkv(heads=4), {"enable_gqa": True, "is_causal": True}),
        (_qkv(heads=4, kv_heads=1), {"enable_gqa": True}),
        ([*_qkv(), _mask(10, "bool")], {}),
        ([*_qkv(), _mask(10, "float")], {}),
        ([*_qkv(), _mask(1, "float")], {}),
    ],
    ids=NAMES,
)
def test_ring_attention_equals_one_device(args: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
    def codes(first: str, second: str = "") -> list[str]:
        found = [f"{first} {second}".strip()] * 3
        if len(args) == 4:
            found.append(found[0] if args[3].shape[2] > 1 else found[0].replace("S2", "I").replace("S1", "I"))
        return [c.replace("S1", "I") if a.shape[1] == 1 else c for c, a in zip(found, args, strict=True)]

    with implicit_communication("error"):
        assert check_op(sdpa, args, codes("S2"), cached_mesh(4), kwargs=kwargs).placements == (Shard(2),)
        check_op(sdpa, args, codes("S0", "S2"), cached_mesh(2, 2), kwargs=kwargs)
        check_op(sdpa, args, codes("S2", "S2"), cached_mesh(2, 2), kwargs=kwargs)
        if len(args) == 3:
            check_op(sdpa, args, codes("S2", "S1"), cached_mesh(2, 2), kwargs=kwargs)
            mixed = codes("S2", "S2")[:1] + codes("S2", "I")[1:]
            check_op(sdpa, args, mixed, cached_mesh(2, 2), kwargs=kwargs)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).view(2, 8, 2, 12).transpose(1, 2).chunk(3, -1)
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 8, 8)


@pytest.mark.ranks(4, pool=True)
def test_module_with_a_sharded_sequence() -> None:
    torch.manual_seed(0)
    plain = _Attention()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    ours = parallelize_module(copy.deepcopy(plain), cached_mesh(4), {"forward": {"input": [Shard(1)]}})
    with implicit_communication("error"):
        out = ours(x)
        out.square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(out.detach().full_tensor(), plain(x).detach())
    torch.testing.assert_close(ours.into.weight.grad.full_tensor(), plain.into.weight.grad)


@pytest.mark.ranks(4, pool=True)
def test_half_precision_is_merged_in_single() -> None:
    args = [t.bfloat16() for t in _qkv(16, 16)]
    check_op(sdpa, args, ["S2"] * 3, cached_mesh(4), kwargs={"is_causal": True}, rtol=3e-2, atol=3e-2)


@pytest.mark.ranks(4, pool=True)
def test_second_derivatives_are_refused() -> None:
    mesh = cached_mesh(4)
    q, k, v = (distribute_tensor(t, mesh, placements("S2")).requires_grad_() for t in _qkv())
    with pytest.raises(UnsupportedOperationError, match="second derivatives"):
        torch.autograd.grad(sdpa(q, k, v).sum(), [q], create_graph=True)


@pytest.mark.ranks(4, pool=True)
def test_every_rank_sends_its_keys_and_values_in_every_round(rank: int) -> None:
    mesh = cached_mesh(4)
    q, k, v = (distribute_tensor(t, mesh, placements("S2")) for t in _qkv(16, 16))
    with explain() as report:
        sdpa(q, k, v)
    block = 2 * 2 * 4 * (4 + 3) * 8
    assert [c.num_bytes for c in report.records if c.kind == "all_to_all"] == [block] * 3


@pytest.mark.parametrize("length", [8, 16, 10, 3, 0])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dealt_pieces_cover_the_sequence_and_share_its_work(length: int, ranks: int) -> None:
    pieces = dealt(length, ranks)
    held = sorted(i for own in pieces for start, count in own for i in range(start, start + count))
    assert held == list(range(length))
    if length % (2 * ranks) == 0:
        work = [sum(i + 1 for start, count in own for i in range(start, start + count)) for own in pieces]
        assert len(set(work)) == 1
