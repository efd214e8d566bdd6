"""`multi_head_attention_forward`, what `nn.MultiheadAttention` calls, with a dim of its own for the heads.

torch's text folds heads into the batch, and batch and positions into rows. Where both are sharded, no
placement describes the result. Here they stay apart, so heads and batch may be sharded at once; the
numbers, and the order in which random ones are drawn, are the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch.resolve import entering
from .._dispatch.table import register

_functional: Any = F  # type checkers do not know all of it
_torchs = entering(_functional.multi_head_attention_forward)
_NAMES = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight "
    "q_proj_weight k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal"
).split()
_APPENDED = ("bias_k", "bias_v", "static_k", "static_v")
"""Arguments that lengthen or replace keys and values: torch's own text serves them."""


def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of `multi_head_attention_forward`."""
    bound = dict(zip(_NAMES, args, strict=False), **kwargs)
    if bound.get("add_zero_attn") or any(bound.get(n) is not None for n in _APPENDED):
        return _torchs(func, args, kwargs)
    return _own(func, (), bound)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    batched = _functional._mha_shape_check(query, key, value, key_padding_mask, attn_mask, num_heads)
    width = query.shape[-1]
    if width != embed_dim_to_check:
        raise AssertionError(f"was expecting embedding dimension of {embed_dim_to_check}, but got {width}")
    if width % num_heads:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {num_heads}")
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "Need attn_mask if specifying the is_causal hint: make one with Transformer.generate_square_subsequent_mask"
        )
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    projected = _project(query, key, value, weights, in_proj_bias)
    if not batched:
        projected = [x.unsqueeze(1) for x in projected]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, rows, _width = projected[0].shape
    q, k, v = (x.reshape(*x.shape[:2], num_heads, width // num_heads).permute(1, 2, 0, 3) for x in projected)
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = _merged(None if causal else attn_mask, key_padding_mask, q, num_heads, k.shape[2])
    dropped = dropout_p if training else 0.0
    if need_weights:
        scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
        attention = F.softmax(scores if mask is None else scores + mask, -1)
        attention = F.dropout(attention, dropped) if dropped else attention
        mixed = torch.matmul(attention, v)
    else:
        attention = None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
    result = F.linear(mixed.permute(2, 0, 1, 3).reshape(length, rows, width), out_proj_weight, out_proj_bias)
    if attention is not None and average_attn_weights:
        attention = attention.mean(1)
    if batched:
        return result, attention
    return result.squeeze(1), None if attention is None else attention.squeeze(0)


def _project(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> list[Tensor]:
    """Queries, keys and values."""
    if isinstance(weights, Tensor) and query is key and key is value:
        return list(F.linear(query, weights, bias).chunk(3, -1))
    parts = weights.chunk(3) if isinstance(weights, Tensor) else weights
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), parts, biases, strict=True)]


def _merged(mask: Tensor | None, padding: Tensor | None, q: Tensor, heads: int, keys: int) -> Tensor | None:
    """What is added to the scores (batch, heads, queries, keys)."""
    rows, queries = q.shape[0], q.shape[2]
    if padding is not None:
        padding = _additive(padding, q.dtype).reshape(rows, 1, 1, keys)
    if mask is None:
        return padding
    wanted = (queries, keys) if mask.dim() == 2 else (rows * heads, queries, keys)
    if mask.shape != wanted:
        raise RuntimeError(f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {wanted}.")
    mask = _additive(mask, q.dtype)
    if mask.dim() == 3:
        mask = mask.reshape(rows, heads, queries, keys)
    return mask if padding is None else mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of numbers to add: minus infinity where one of bools is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


_own_text: Any = _forward
_own = entering(_own_text)
register("nn.functional.multi_head_attention_forward", multi_head_attention)
