"""`scaled_dot_product_attention` and `nn.MultiheadAttention` against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Shard, distribute_tensor
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_dtensor._random import random_mode
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, compare, placements, random_codes

sdpa = F.scaled_dot_product_attention
MESHES = [(4,), (2, 2)]


def _qkv(
    heads: int = 4, kv_heads: int | None = None, batch: int = 3, length: int = 5, keys: int = 6
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = [(batch, heads, length, 4), (batch, kv_heads, keys, 4), (batch, kv_heads, keys, 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _mask(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


CASES: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "plain": (_qkv(), {}),
    "scale": (_qkv(), {"scale": 0.3}),
    "causal": (_qkv(), {"is_causal": True}),
    "grouped": (_qkv(4, 2), {"enable_gqa": True}),
    "grouped-causal": (_qkv(8, 4), {"enable_gqa": True, "is_causal": True}),
    "one-kv-head": (_qkv(4, 1), {"enable_gqa": True}),
    "three-dims": ([t[:, 0] for t in _qkv()], {}),
    "mask": ([*_qkv(), _mask(3, 4, 5, 6)], {}),
    "mask-broadcast": ([*_qkv(), _mask(3, 1, 1, 6)], {}),
    "mask-two-dims": ([*_qkv(), torch.ones(5, 6, dtype=torch.bool).tril()], {}),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    args, kwargs = CASES[case]
    mesh = cached_mesh(*mesh_shape)
    for codes in random_codes(args, len(mesh_shape), seed=len(case), count=12):
        with implicit_communication("allow"):
            check_op(sdpa, args, codes, mesh, kwargs=kwargs)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "one-kv-head"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 1, 2)], ids=str)
def test_batch_and_heads_communicate_nothing(case: str, mesh_shape: tuple[int, ...]) -> None:
    args, kwargs = CASES[case]
    codes = " ".join(["S0", *["I"] * (len(mesh_shape) - 2), "S1"])
    whole = codes.replace("S1", "I")
    with implicit_communication("error"):
        out = check_op(
            sdpa,
            args,
            [codes, *[whole if a.shape[1] == 1 else codes for a in args[1:]]],
            cached_mesh(*mesh_shape),
            kwargs=kwargs,
        )
    assert out.placements[0] == Shard(0)
    assert out.placements[-1] == Shard(1)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("causal", [False, True])
def test_sharded_query_positions(causal: bool) -> None:
    args = _qkv(length=6)
    with implicit_communication("error"):
        out = check_op(sdpa, args, ["S2", "I", "I"], cached_mesh(4), kwargs={"is_causal": causal})
    assert out.placements == (Shard(2),)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 S1", "I I", "S1 S0"])
@pytest.mark.parametrize("variant", ["plain", "causal", "mask", "float-mask", "grouped"])
def test_dropout_in_whole_mode_equals_one_device(variant: str, codes: str) -> None:
    mesh = cached_mesh(2, 2)
    args: list[Any] = _qkv(4, 2 if variant == "grouped" else None, keys=6)
    kwargs: dict[str, Any] = {"dropout_p": 0.4, "is_causal": variant == "causal", "enable_gqa": variant == "grouped"}
    all_codes = [codes] * 3
    if "mask" in variant:
        mask = torch.ones(5, 6, dtype=torch.bool).tril()
        mask[2] = False
        args.append(mask if variant == "mask" else mask.double())
        all_codes.append("I I")

    def fn(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return sdpa(*args, **kwargs)

    with random_mode("whole"), implicit_communication("allow"):
        check_op(fn, args, all_codes, mesh, kwargs=kwargs)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("heads", ["replicated", "sharded-batch"])
@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_module(heads: str, weights: bool) -> None:
    mesh = cached_mesh(4)
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
    expected = module(x, x, x, need_weights=weights)
    expected[0].square().sum().backward()
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        owner.register_parameter(
            name.rpartition(".")[2], distribute_tensor(torch.nn.Parameter(parameter.detach()), mesh)
        )
    ours = distribute_tensor(x.detach(), mesh, placements("S0" if heads != "replicated" else "I")).requires_grad_()
    with implicit_communication("allow"):
        out = module(ours, ours, ours, need_weights=weights)
        compare(out[0], expected[0])
        if weights:
            compare(out[1], expected[1])
        out[0].square().sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
def test_uneven_grouped_heads_are_moved_not_misaligned() -> None:
    args = _qkv(6, 2)
    with implicit_communication("allow"):
        out = check_op(sdpa, args, ["S1", "S1", "S1"], cached_mesh(4), kwargs={"enable_gqa": True})
    assert out.placements != (Shard(1),)


@pytest.mark.ranks(4, pool=True)
def test_query_heads_find_their_groups_among_all_key_and_value_heads() -> None:
    """Two groups of heads over four ranks do not divide; a cut inside a cut of queries alone keeps them apart too."""
    args = _qkv(8, 2)
    for shape, codes in {
        (4,): ["S1", "R", "R"],
        (2, 2): ["S1 S1", "S1 R", "S1 R"],
    }.items():
        for kwargs in ({}, {"is_causal": True}, {"scale": 0.5}):
            with implicit_communication("error"):
                result = check_op(sdpa, args, codes, cached_mesh(*shape), kwargs={"enable_gqa": True, **kwargs})
            assert all(p == Shard(1) for p in result.placements)
    for codes in (["S1 S1", "R S1", "R S1"], ["S1 S2", "R R", "R R"], ["S1 S1", "R S1", "S1 R"]):
        with implicit_communication("allow"):
            check_op(sdpa, args, codes, cached_mesh(2, 2), kwargs={"enable_gqa": True, "is_causal": True})
