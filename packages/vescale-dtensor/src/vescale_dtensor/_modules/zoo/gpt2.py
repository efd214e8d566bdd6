"""`gpt2`: GPT-2 of transformers, whose linear layers (`Conv1D`) keep their weights as (in, out)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...placements import InterleavedShard, Shard
from ..registry import Plan
from ._parts import (
    COLUMN,
    GATHERED,
    MASKS,
    PREFIX,
    SEQUENCE,
    WHOLE,
    Entries,
    axis_size,
    cut,
    inputs,
    require,
    setting,
)

_BLOCK = rf"{PREFIX}h\.\d+\."
_OUT, _IN = {"tp": Shard(1)}, {"tp": Shard(0)}
"""A weight (in, out) cut by its outputs, and by its inputs."""


def gpt2(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for `wte`, `wpe`, `h.N.attn.c_attn`, `h.N.mlp.c_fc`, `ln_f`, and a tied `lm_head`."""
    require(
        module, "gpt2", ("wte", r"h\.\d+\.attn\.c_attn", r"h\.\d+\.mlp\.c_fc", "ln_f"),
        "GPT-2 of transformers: wte, wpe, h.N.attn.c_attn, h.N.mlp.c_fc, ln_f and lm_head",
    )  # fmt: skip
    parameter = {
        **cut(("wte", "lm_head"), COLUMN),
        **cut((r"mlp\.c_fc",), _OUT),
        rf"{PREFIX}mlp\.c_fc\.bias": {"tp": Shard(0)},
        **cut((r"mlp\.c_proj",), _IN),
    }
    forward: Entries = {
        **inputs("position_ids", *MASKS),
        f"{PREFIX}wte.output": SEQUENCE,
        f"{_BLOCK}attn.input.hidden_states": WHOLE,
        rf"{_BLOCK}attn\.c_proj.output": SEQUENCE,
        f"{_BLOCK}mlp.input": GATHERED,
        rf"{_BLOCK}mlp\.c_proj.output": SEQUENCE,
        f"{PREFIX}ln_f.output": GATHERED,
    }
    ranks = axis_size(mesh, "tp")
    if setting(module, ("num_attention_heads",), ranks) % ranks == 0:
        parameter |= {
            rf"{PREFIX}attn\.c_attn\.weight": {
                "tp": InterleavedShard(1, 3)
            },  # queries, keys, values: each of them is cut
            rf"{PREFIX}attn\.c_attn\.bias": {"tp": InterleavedShard(0, 3)},
            **cut((r"attn\.c_proj",), _IN),
        }
        forward[f"{_BLOCK}attn.input.hidden_states"] = GATHERED
    return {"parameter": parameter, "forward": forward}
