"""`multi_head_attention_forward` with batch and heads sharded, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication, random_mode
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes

RANKS = pytest.mark.ranks(4, pool=True)
WIDTH, HEADS, LENGTH, KEYS, ROWS = 8, 4, 5, 6, 3


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _attention(query: Tensor, key: Tensor, value: Tensor, weights: Any, **kwargs: Any) -> Any:
    """`multi_head_attention_forward` with weights by name."""
    defaults: dict[str, Any] = {
        "embed_dim_to_check": query.shape[-1], "num_heads": HEADS, "in_proj_weight": None, "in_proj_bias": None,
        "bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0, "out_proj_bias": None,
    }  # fmt: skip
    return F.multi_head_attention_forward(query, key, value, **{**defaults, **weights, **kwargs})


def _tokens(length: int, seed: int) -> Tensor:
    return _randn(length, ROWS, WIDTH, seed=seed)


def _packed() -> dict[str, Tensor]:
    shapes = {"in_proj_weight": (3 * WIDTH, WIDTH), "in_proj_bias": (3 * WIDTH,), "out_proj_weight": (WIDTH, WIDTH)}
    return {n: _randn(*s, seed=7 + i) for i, (n, s) in enumerate({**shapes, "out_proj_bias": (WIDTH,)}.items())}


def _separate() -> dict[str, Any]:
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight")
    return {"use_separate_proj_weight": True, **{n: _randn(WIDTH, WIDTH, seed=i) for i, n in enumerate(names)}}


PADDING = torch.tensor([[False] * KEYS, [False] * 4 + [True] * 2, [False] * KEYS])
CAUSAL = torch.ones(LENGTH, KEYS, dtype=torch.bool).triu(1)
CASES: dict[str, dict[str, Any]] = {
    "weights": {},
    "weights-per-head": {"average_attn_weights": False},
    "fused": {"need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding-fused": {"key_padding_mask": PADDING, "need_weights": False},
    "both-masks": {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": False},
    "mask": {"attn_mask": _randn(LENGTH, KEYS)},
    "mask-per-head": {"attn_mask": _randn(ROWS * HEADS, LENGTH, KEYS), "need_weights": False},
    "causal-hint": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "added-zeros": {"add_zero_attn": True},
    "added-biases": {"bias_k": _randn(1, 1, WIDTH), "bias_v": _randn(1, 1, WIDTH, seed=1)},
}


@RANKS
@pytest.mark.parametrize("case", CASES)
def test_attention_of_two_sequences_equals_one_device(case: str) -> None:
    args = (_tokens(LENGTH, 1), _tokens(KEYS, 2), _tokens(KEYS, 3))
    for weights in (_packed(), _separate()):
        kwargs = {"weights": weights, **CASES[case]}
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for codes in random_codes(tensors, 2, seed=len(case), count=3, partial=False):
            with implicit_communication("allow"):
                check_op(_attention, args, codes, cached_mesh(2, 2), kwargs=kwargs)


@RANKS
def test_self_attention_cuts_batch_and_heads_without_communication() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    weights = {f"{c}_proj_weight": _randn(WIDTH, WIDTH, seed=i) for i, c in enumerate("qkv")}
    sharded = {n: distribute_tensor(w, mesh, [Replicate(), Shard(0)]) for n, w in weights.items()}
    out = _randn(WIDTH, WIDTH, seed=9)
    x = _tokens(LENGTH, 1)[:, :2]
    ours = distribute_tensor(x, mesh, [Shard(1), Replicate()])
    for need_weights in (True, False):
        expected, expected_weights = _attention(
            x, x, x, {**weights, "out_proj_weight": out}, use_separate_proj_weight=True, need_weights=need_weights
        )
        with implicit_communication("error"):
            actual, actual_weights = _attention(
                ours, ours, ours,
                {**sharded, "out_proj_weight": distribute_tensor(out, mesh, [Replicate(), Shard(1)])},
                use_separate_proj_weight=True, need_weights=need_weights,
            )  # fmt: skip
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        if need_weights:
            torch.testing.assert_close(actual_weights.full_tensor(), expected_weights, rtol=1e-10, atol=1e-10)
        else:
            assert actual_weights is None


@RANKS
@pytest.mark.parametrize("batch_first", [False, True])
def test_module_with_dropout_and_without_a_batch(batch_first: bool) -> None:
    mesh = cached_mesh(2, 2)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=batch_first, dtype=torch.float64)
    x = _randn(4, LENGTH, WIDTH) if batch_first else _randn(LENGTH, 4, WIDTH)
    for need_weights in (True, False):
        for tokens in (x, x[0]):
            torch.manual_seed(5)
            expected = module(tokens, tokens, tokens, need_weights=need_weights)[0]
            ours = distribute_tensor(tokens, mesh, [Shard(0), Replicate()])
            torch.manual_seed(5)
            with random_mode("whole"), implicit_communication("allow"), _plain():
                actual = module(ours, ours, ours, need_weights=need_weights)[0]
            assert isinstance(actual, DTensor)
            torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-10, atol=1e-10)


def _plain() -> Any:
    from vescale_dtensor import plain_tensors

    return plain_tensors("replicate")


@RANKS
def test_arguments_that_do_not_fit_are_refused_as_by_torch() -> None:
    mesh = cached_mesh(4)
    weights = {n: distribute_tensor(w, mesh, [Replicate()]) for n, w in _packed().items()}
    x = distribute_tensor(_tokens(LENGTH, 1), mesh, [Replicate()])
    with pytest.raises(AssertionError, match="expecting embedding dimension of 9"):
        _attention(x, x, x, weights, embed_dim_to_check=9)
    with pytest.raises(AssertionError, match="embed_dim 8 not divisible by num_heads 3"):
        _attention(x, x, x, weights, num_heads=3)
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        _attention(x, x, x, weights, is_causal=True)
    with pytest.raises(RuntimeError, match=r"shape of the 2D attn_mask .* should be \(5, 5\)"):
        _attention(x, x, x, weights, attn_mask=distribute_tensor(CAUSAL, mesh, [Replicate()]))
