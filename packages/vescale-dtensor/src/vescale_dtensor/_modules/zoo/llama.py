"""`llama`: decoders of transformers with rotary positions and gated MLPs (Llama, Mistral, Qwen, Gemma).

Key and value heads that do not divide by the ranks of "tp" stay whole; query heads that do not leave the
whole attention so.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..registry import Plan
from ._parts import (
    COLUMN,
    GATHERED,
    MASKS,
    PREFIX,
    ROW,
    SEQUENCE,
    WHOLE,
    Entries,
    axis_size,
    cut,
    inputs,
    require,
    setting,
)

LAYER = rf"{PREFIX}layers\.\d+\."


def llama(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for `embed_tokens`, `layers.N.self_attn`, `layers.N.mlp.gate_proj`, `norm`, `lm_head` and the like."""
    require(
        module, "llama", ("embed_tokens", r"layers\.\d+\.self_attn\.q_proj", r"layers\.\d+\.mlp\.gate_proj", "norm"),
        "decoders of transformers in the style of Llama: embed_tokens, layers.N.self_attn.q_proj, "
        "layers.N.mlp.gate_proj, norm and lm_head",
    )  # fmt: skip
    parameter, forward = around(module, mesh)
    parameter |= cut((r"mlp\.(gate|up)_proj",), COLUMN, bias=True) | cut((r"mlp\.down_proj",), ROW)
    forward |= {f"{LAYER}mlp.input": GATHERED, rf"{LAYER}mlp\.down_proj.output": SEQUENCE}
    return {"parameter": parameter, "forward": forward}


def around(module: nn.Module, mesh: DeviceMesh) -> tuple[Entries, Entries]:
    """Entries for parameters and forwards of all but the MLPs."""
    parameter = cut(("embed_tokens", "lm_head"), COLUMN)
    forward = {
        **inputs("position_ids", *MASKS),
        f"{PREFIX}embed_tokens.output": SEQUENCE,
        f"{PREFIX}norm.output": GATHERED,  # here, for models take the last positions before they call lm_head
    }
    attention = rf"{LAYER}self_attn"
    ranks = axis_size(mesh, "tp")
    heads = setting(module, ("num_attention_heads",), ranks)
    if heads % ranks:
        return parameter, forward | {f"{attention}.input.hidden_states": WHOLE}
    kept = setting(module, ("num_key_value_heads",), heads) % ranks
    parameter |= cut((rf"self_attn\.{'q' if kept else '(q|k|v)'}_proj",), COLUMN, bias=True)
    parameter |= cut((r"self_attn\.o_proj",), ROW)
    forward |= {f"{attention}.input.hidden_states": GATHERED, rf"{attention}\.o_proj.output": SEQUENCE}
    return parameter, forward
