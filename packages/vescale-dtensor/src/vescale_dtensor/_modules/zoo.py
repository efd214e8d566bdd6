"""Plans for well-known models. Importing this module registers them.

`nanogpt`: GPTs in the style of nanoGPT, on the mesh axes "dp" and "tp", either of which may be missing.
The batch is cut along "dp". Along "tp", attention heads, the hidden features of the MLP and the vocabulary
are cut as in Megatron-LM, and between blocks the sequence is cut, so that norms and dropouts work on their
share (sequence parallelism). A fused `c_attn` stays whole, because its thirds cannot be cut as one block.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanError
from ..placements import Replicate, Shard, Varying
from .registry import Plan, register_plan

_PREFIX = r"(.*\.)?"
_COLUMN = r"(attn\.(q|k|v)_proj|mlp\.(up|c_fc))"
_ROW = r"(attn\.o_proj|mlp\.(down|c_proj))"
_HEAD = r"(lm_)?head"


def nanogpt(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for a nanoGPT-style model: `wte`, `wpe`, `h.N.attn.q_proj`, `h.N.mlp.up`, `ln_f`, `head` and the like."""
    names = [n for n, _ in module.named_modules()]
    for part in (r"wte", r"h\.\d+\.mlp"):
        if not any(re.fullmatch(_PREFIX + part, n) for n in names):
            raise PlanError(
                f'the plan "nanogpt" found no module {part!r} in {type(module).__name__}; '
                f"it serves models with wte, wpe, "
                f"h.N.ln_1, h.N.attn, h.N.ln_2, h.N.mlp, ln_f and head, here are {names[1:8]}"
            )
    features = {"tp": Shard(0)}
    sequence, gathered = {"tp": Shard(1)}, {"tp": Varying()}
    parameter: dict[str, Any] = {
        rf"{_PREFIX}wte\.weight": features,
        rf"{_PREFIX}{_HEAD}\.weight": features,
        rf"{_PREFIX}{_COLUMN}\.(weight|bias)": features,
        rf"{_PREFIX}{_ROW}\.weight": {"tp": Shard(1)},
    }
    forward: dict[str, Any] = {
        "input": {"dp": Shard(0)},
        rf"{_PREFIX}wte.output": sequence,
        rf"{_PREFIX}h\.\d+\.(ln_1|ln_2).input": sequence,
        # gathering into Varying makes the backward a reduce-scatter instead of an all-reduce and a slice
        rf"{_PREFIX}h\.\d+\.(attn|mlp).input": gathered,
        rf"{_PREFIX}h\.\d+\.{_ROW}.output": sequence,
        rf"{_PREFIX}h\.\d+\.(attn|mlp).output": sequence,
        rf"{_PREFIX}ln_f.input": sequence,
        rf"{_PREFIX}{_HEAD}.input": gathered,
    }
    if not any(re.fullmatch(_PREFIX + r"attn\.o_proj", n) for n in names):  # a fused, whole attention
        forward[rf"{_PREFIX}h\.\d+\.attn.input"] = {"tp": Replicate()}
    return {"parameter": parameter, "forward": forward}


register_plan("nanogpt", nanogpt)
