"""`nanogpt`: GPTs in the style of nanoGPT, with one projection for queries, keys and values, or three."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...placements import InterleavedShard
from ..registry import Plan
from ._parts import BATCH, COLUMN, GATHERED, PREFIX, ROW, SEQUENCE, cut, has, require

_COLUMN = r"(attn\.(q|k|v)_proj|mlp\.(up|c_fc))"
_ROW = r"(attn\.o_proj|mlp\.(down|c_proj))"
_HEAD = r"(lm_)?head"


def nanogpt(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for a nanoGPT-style model: `wte`, `wpe`, `h.N.attn.q_proj`, `h.N.mlp.up`, `ln_f`, `head` and the like."""
    require(
        module, "nanogpt", (r"wte", r"h\.\d+\.mlp"),
        "models with wte, wpe, h.N.ln_1, h.N.attn, h.N.ln_2, h.N.mlp, ln_f and head",
    )  # fmt: skip
    parameter = {
        **cut(("wte", _HEAD), COLUMN),
        **cut((_COLUMN,), COLUMN, bias=True),
        **cut((_ROW,), ROW),
    }
    forward: dict[str, Any] = {
        "input": BATCH,
        rf"{PREFIX}wte.output": SEQUENCE,
        rf"{PREFIX}h\.\d+\.(ln_1|ln_2).input": SEQUENCE,
        rf"{PREFIX}h\.\d+\.(attn|mlp).input": GATHERED,
        rf"{PREFIX}h\.\d+\.{_ROW}.output": SEQUENCE,
        rf"{PREFIX}h\.\d+\.(attn|mlp).output": SEQUENCE,
        rf"{PREFIX}ln_f.input": SEQUENCE,
        rf"{PREFIX}{_HEAD}.input": GATHERED,
    }
    if has(module, r"attn\.c_attn"):
        parameter |= {rf"{PREFIX}attn\.c_attn\.(weight|bias)": {"tp": InterleavedShard(0, 3)}}
        parameter |= cut((r"attn\.c_proj",), ROW)
        forward[rf"{PREFIX}h\.\d+\.attn\.c_proj.output"] = SEQUENCE
    return {"parameter": parameter, "forward": forward}
