"""`mixtral`: Mixtral of transformers. Attention as in `llama`; along "tp" the hidden features of every expert are cut.

With `config._experts_implementation = "batched_mm"` all of it stays sharded. "grouped_mm" sorts all tokens by expert
and "eager" looks for those of each: both gather what is cut along "dp".
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...placements import InterleavedShard, Shard
from ..registry import Plan
from ._parts import GATHERED, PREFIX, SEQUENCE, require
from .llama import LAYER, around


def mixtral(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for models with `layers.N.mlp.gate` and `layers.N.mlp.experts` in place of an MLP."""
    require(
        module, "mixtral", ("embed_tokens", r"layers\.\d+\.mlp\.experts", "norm"),
        "decoders of transformers in the style of Mixtral: embed_tokens, layers.N.self_attn.q_proj, "
        "layers.N.mlp.gate, layers.N.mlp.experts, norm and lm_head",
    )  # fmt: skip
    parameter, forward = around(module, mesh)
    parameter |= {
        rf"{PREFIX}experts\.gate_up_proj": {"tp": InterleavedShard(1, 2)},  # (experts, gate and up, width)
        rf"{PREFIX}experts\.down_proj": {"tp": Shard(2)},
    }
    forward |= {
        f"{LAYER}mlp.input.hidden_states": GATHERED,
        rf"{LAYER}mlp\.gate.output.1": GATHERED,  # scores: what is scaled by them may stay a pending sum
        f"{LAYER}mlp.output": SEQUENCE,
    }
    return {"parameter": parameter, "forward": forward}
