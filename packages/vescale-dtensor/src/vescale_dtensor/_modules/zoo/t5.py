"""`t5`: encoder-decoders of transformers in the style of T5.

Relative positions are a bias per head and are cut with the heads. What the encoder returns is gathered
once for the cross attentions of all decoder blocks.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..registry import Plan
from ._parts import COLUMN, GATHERED, MASKS, PREFIX, ROW, SEQUENCE, WHOLE, axis_size, cut, inputs, require, setting

_ATTENTION = r"(SelfAttention|EncDecAttention)"
_BLOCK = rf"{PREFIX}block\.\d+\.layer\.\d+\."


def t5(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for `shared`, `encoder.block.N.layer.M`, `decoder.block.N.layer.M`, `final_layer_norm` and `lm_head`."""
    require(
        module, "t5", (r"block\.\d+\.layer\.\d+\.SelfAttention", "final_layer_norm"),
        "models of transformers in the style of T5: shared, encoder.block.N.layer.0.SelfAttention, "
        "layer.M.DenseReluDense, final_layer_norm and lm_head",
    )  # fmt: skip
    parameter = {
        **cut(("shared", "embed_tokens", "lm_head", r"DenseReluDense\.wi(_\d)?"), COLUMN),
        **cut((r"DenseReluDense\.wo",), ROW),
    }
    attention = f"{_BLOCK}{_ATTENTION}"
    forward = {
        **inputs(*MASKS),
        f"{PREFIX}(shared|embed_tokens).output": SEQUENCE,
        f"{attention}.input.hidden_states": WHOLE,
        rf"{attention}\.o.output": SEQUENCE,
        f"{_BLOCK}DenseReluDense.input": GATHERED,
        rf"{_BLOCK}DenseReluDense\.wo.output": SEQUENCE,
        f"{PREFIX}final_layer_norm.output": GATHERED,
    }
    ranks = axis_size(mesh, "tp")
    if setting(module, ("num_heads",), ranks) % ranks == 0:
        parameter |= cut((rf"{_ATTENTION}\.(q|k|v)",), COLUMN) | cut((rf"{_ATTENTION}\.o",), ROW)
        parameter |= cut((r"relative_attention_bias",), ROW)
        forward[f"{attention}.input.hidden_states"] = GATHERED
    return {"parameter": parameter, "forward": forward}
