"""`vit`: vision transformers of transformers, with any head that takes the first token."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..registry import Plan
from ._parts import COLUMN, GATHERED, MASKS, PREFIX, ROW, SEQUENCE, WHOLE, axis_size, cut, inputs, require, setting

_LAYER = rf"{PREFIX}layers\.\d+\."


def vit(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for `embeddings.patch_embeddings`, `layers.N.attention.q_proj`, `layers.N.mlp.fc1`, `layernorm`."""
    require(
        module, "vit", (r"embeddings\.patch_embeddings", r"layers\.\d+\.attention\.q_proj", r"layers\.\d+\.mlp\.fc1"),
        "vision transformers of transformers 5: embeddings.patch_embeddings, layers.N.attention.q_proj, "
        "layers.N.mlp.fc1 and layernorm",
    )  # fmt: skip
    parameter = cut((r"mlp\.fc1",), COLUMN, bias=True) | cut((r"mlp\.fc2",), ROW)
    forward = {
        **inputs(*MASKS),
        f"{PREFIX}embeddings.output": SEQUENCE,
        f"{_LAYER}attention.input.hidden_states": WHOLE,
        rf"{_LAYER}attention\.o_proj.output": SEQUENCE,
        f"{_LAYER}mlp.input": GATHERED,
        rf"{_LAYER}mlp\.fc2.output": SEQUENCE,
        f"{PREFIX}layernorm.output": WHOLE,  # heads take one token, so all ranks do the little that is left
    }
    ranks = axis_size(mesh, "tp")
    if setting(module, ("num_attention_heads",), ranks) % ranks == 0:
        parameter |= cut((r"attention\.(q|k|v)_proj",), COLUMN, bias=True) | cut((r"attention\.o_proj",), ROW)
        forward[f"{_LAYER}attention.input.hidden_states"] = GATHERED
    return {"parameter": parameter, "forward": forward}
